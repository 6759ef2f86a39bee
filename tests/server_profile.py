"""A profile text of one eval, on servers."""


def profile_of_servers(
    items: int,
    repeats: int,
    margin: float,
    *,
    kind: str,
    required: str = '"evals"',
    eval_lines: str = "",
    more: str = "",
) -> str:
    """`eval_lines` go into the eval's own table, `more` are tables of other gates."""
    return f"""
description = "One eval, on servers."
required = [{required}]
[target]
kind = "{kind}"
[baseline]
decode_backend = "auto"
[candidate]
decode_backend = "latency_specialized"
[gates.evals]
origin = "generated"
batch = 64
drafts = 0
kv_cache_dtype = "bf16"
[[gates.evals.evals]]
name = "aime25"
items = {items}
repeats = {repeats}
margin = {margin}
{eval_lines}
{more}
"""
