"""`python -m numerics.contracts`: table and sites of docs/ops.md, "What each path rounds", on standard output."""

from numerics.contracts import contract_table, site_list

if __name__ == "__main__":
    print(contract_table(), site_list(), sep="\n\n")
