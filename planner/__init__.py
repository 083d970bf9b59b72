"""Which recipe fits a card, and how good the predictions are: the course's planner.

    from planner import fit
    print(fit("qwen3-8b", "24GiB", length=4096))

In a terminal: `onegpu predict`, `onegpu fit`, `onegpu report`. Importing this package loads nothing
else: torch and transformers come with the first name that is asked for.
"""

HOMES = {  # the module of each public name
    "Fit": "answer",
    "Plan": "techniques",
    "Recipe": "answer",
    "chunked_loss": "changes",
    "fit": "search",
    "in_backward": "changes",
    "judged": "report",
    "part": "changes",
    "predict_rank": "ranks",
    "rank_script": "ranks",
}
__all__ = [*HOMES]


def __getattr__(name: str):
    """A public name, loaded when it is first used (PEP 562)."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fake_cuda.loading import load  # first: it quiets libraries that print when they load

    return getattr(load(f"{__name__}.{HOMES[name]}"), name)
