"""The class that vLLM wraps around processors of single requests."""


class AdapterLogitsProcessor:
    pass
