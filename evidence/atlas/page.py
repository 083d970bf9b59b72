"""What is said with the atlas: cards, the planner's rules, and prices and code of each recipe.

    python -m evidence words

The page "Will it fit?" and `onegpu fit` read it (`planner.recorded`). The code is the planner's own
(`planner.script`), with marks in place of the four numbers that depend on the question.
"""

import json
from dataclasses import asdict, dataclass

from evidence.atlas import points, table
from evidence.atlas.amounts import MiB
from evidence.atlas.points import FAMILIES, FULL, LENGTHS, MICRO_BATCHES, lengths_of
from fake_cuda import cost
from fake_cuda.scratch import workspace
from fake_cuda.units import PICTURES, SAMPLES
from helpers.hardware import gpu, supports
from helpers.prediction import CONTEXT
from planner import candidates, recorded, search
from planner.answer import ORDERS
from planner.lengths import positions
from planner.question import SMALL_LOGITS, Question, ask, blind_margin, find_card, known_cards
from planner.script import script
from planner.techniques import CHUNKED_LOSS, KINDS, LIGER, ON_THE_HOST, SMALLEST, WAYS, Plan

THREADS = 2  # that multiply matrices, the forward's and the backward's: each has a workspace
SIZES = (8, 10, 12, 16, 24, 32, 40, 48, 64, 80, 96)  # GiB, of a card that is not in the list
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # samples of a step
# Numbers that stand in no script by themselves, in place of those of a question; each model reads
# as many tokens.
MARKS = {"length": 443, "micro_batch": 1009, "accumulation": 1013}
LESSONS = {  # that teach a technique, by its name
    "8-bit AdamW": "07_optimizers",
    "Adafactor": "07_optimizers",
    "updates in backward": "07_optimizers",
    "bf16 weights": "06_mixed_precision",
    "LoRA": "12_parameter_efficient_fine_tuning",
    "4-bit weights": "13_quantized_fine_tuning",
    "chunked loss": "11_attention_and_kernels",
    "Liger kernels": "11_attention_and_kernels",
    "checkpointing": "05_gradient_checkpointing",
    "checkpoints on the host": "05_gradient_checkpointing",
}


def models() -> list[str]:
    """Those that are recorded."""
    return [model for model in table.MODELS if table.file_of(model).exists()]


@dataclass(frozen=True)
class Named:
    """A card, or a size of one; sizes in MiB. Without a family nothing is recorded for it."""

    name: str
    memory: float
    context: float
    workspaces: int  # how much more cuBLAS takes than on the card that is recorded of the family
    family: str
    like: str  # the card whose seconds count
    timed: bool
    precision: str


def family_of(capability: tuple[int, int]) -> str:
    """The name of a card's family; "" where it is in none."""
    names = (name for name, family in FAMILIES.items() if capability[0] in family.majors)
    return next(names, "")


def more_workspaces(capability: tuple[int, int], family: str) -> int:
    """MiB that cuBLAS takes on a card beyond what is recorded of its family, which is that of one
    card; 0 without a family.

    >>> more_workspaces((8, 9), "ampere"), more_workspaces((12, 0), "ampere")
    (0, 48)
    """
    if not family:
        return 0
    recorded_ = workspace(gpu(FAMILIES[family].card).capability)
    return round(THREADS * (workspace(capability) - recorded_) / MiB)


def timed_cards() -> set[str]:
    """The cards whose seconds are recorded of some model."""
    families = (family for name in models() for family in table.read(name)["families"].values())
    recipes = (own for family in families for own in family.values())
    return {card for own in recipes for card in own.get("seconds", {})}


def named_cards() -> list[Named]:
    """The cards that the planner knows, the smallest first, then sizes."""
    found, timed = [], timed_cards()
    sizes = [f"{n}GiB" for n in SIZES]
    for name in [*(card.name for card in known_cards() if supports("fp16", card)), *sizes]:
        card = find_card(name)
        family = family_of(card.capability)
        found.append(
            Named(
                name,
                card.memory / MiB,
                (card.context or CONTEXT) / MiB,
                more_workspaces(card.capability, family),
                family,
                card.name,
                card.name in timed,
                "bf16" if supports("bf16", card) else "fp16",
            )
        )
    return found


def index() -> dict:
    """What is the same for all models: cards, the planner's rules, its order."""
    return {
        "models": models(),
        "lengths": LENGTHS,
        "micro_batches": MICRO_BATCHES,
        "batches": BATCHES,
        "tokens": points.MOST_TOKENS,
        "cards": [asdict(card) for card in named_cards()],
        "margin": blind_margin(),
        "small_logits": SMALL_LOGITS,
        "faster": search.FASTER,
        "as_fast": candidates.AS_FAST,
        "as_small": search.AS_SMALL,
        "orders": ORDERS,
        "limits": cost.KINDS,
        "samples": SAMPLES,
        "smallest": SMALLEST.name,
        "kinds": [
            {"name": kind.name, "adapters": kind.adapters, "accumulates": kind.accumulates}
            for kind in KINDS
        ],
        "ways": [
            {
                "name": way.name,
                "logits": next((t.name for t in way.techniques if t in (LIGER, CHUNKED_LOSS)), ""),
                "host": ON_THE_HOST in way.techniques,
            }
            for way in WAYS
        ],
    }


def template(question: Question, plan: Plan) -> str:
    """The planner's script with {length}, {micro_batch}, {accumulation} and {samples}."""
    text = script(question, plan, MARKS["micro_batch"])
    marks = {"samples": 2 * question.batch, **MARKS}
    for name, number in marks.items():
        text = text.replace(str(number), "{" + name + "}")
    return text


def marked(model: str, card: str) -> Question:
    """The question in which each number is a mark."""
    batch = MARKS["micro_batch"] * MARKS["accumulation"]
    length = None if ask(model, card).workload.task == PICTURES else MARKS["length"]
    return ask(model, card, length=length, batch=batch)


def said_of(model: str) -> dict:
    """What is said of a model, and of each of its recipes."""
    families = {}
    for family, recipes in table.read(model)["families"].items():
        question = marked(model, FAMILIES[family].card)
        offered = {t for way in question.ways() for t in way.techniques} & {LIGER, CHUNKED_LOSS}
        whys = {name: own["why"] for name, own in recipes.items() if "why" in own}
        families[family] = {
            "spares": next((technique.name for technique in offered), ""),
            "without_liger": question.without_liger,
            "missing": sorted(name for name, why in whys.items() if why != FULL),
            "recipes": {
                name: about(question, Plan.named(name)) for name in recipes if name not in whys
            },
        }
    config, usual = question.workload.config.get_text_config(), ask(model, FAMILIES[family].card)
    return {
        "hub_id": question.hub_id,
        "task": question.workload.task,
        "image_size": question.workload.image_size,
        "parameters": question.workload.parameters(),
        "vocabulary": getattr(config, "vocab_size", 0),
        "positions": positions(config),
        "window": getattr(config, "sliding_window", None),
        "length": usual.workload.length,
        "lengths": lengths_of(model),
        "families": families,
    }


def said() -> dict:
    """All of it."""
    return {"index": index(), "models": {model: said_of(model) for model in models()}}


def write() -> None:
    """Into a file beside the atlas."""
    table.replace(recorded.PLANNER, said())


def of_model(model: str) -> dict:
    """What is recorded of a model, with what is said and pasted for each recipe."""
    table.read(model)  # a damaged file is told
    return recorded.of_model(model)


def about(question: Question, plan: Plan) -> dict:
    """What is said of a recipe."""
    taught = dict.fromkeys(LESSONS[t.name] for t in plan.techniques if t.name in LESSONS)
    return {
        "price": question.price(plan),
        "lessons": list(taught),
        "code": template(question, plan),
    }


def text(content: dict) -> str:
    """As JSON, without blanks."""
    return json.dumps(content, separators=(",", ":"))
