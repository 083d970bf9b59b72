"""What may stand in each table under `data/`: one schema a table, checked with pandera."""

from pathlib import Path

import pandas as pd

from evidence.schemas import by_hand, checking, measured, predicted

SCHEMAS = {  # by path below data/, without ".csv"
    "alt": by_hand.alt,
    "announced_h100": predicted.announced,
    "atlas_check": predicted.atlas_check,
    "blind_kernel_times": predicted.blind_kernel_times,
    "blind_kernels": predicted.blind_peaks,
    "blind_peaks": predicted.blind_peaks,
    "blind_several_cards": predicted.blind_peaks,
    "blind_speeds": predicted.blind_speeds,
    "blind_speeds_2": predicted.blind_speeds,
    "board": by_hand.board,
    "calculators": predicted.calculators,
    "claims": by_hand.claims,
    "fits": predicted.fits,
    "gpus": measured.gpus,
    "kernel_times": predicted.kernel_times,
    "links": by_hand.links,
    "minutes": by_hand.minutes,
    "predictions": predicted.predictions,
    "real_cards": predicted.real_cards,
    "scoreboard": by_hand.scoreboard,
    "several_cards": predicted.real_cards,
    "speed_constants": predicted.speed_constants,
    "speeds": predicted.speeds,
    "techniques": by_hand.techniques,
    "measurements/adapter_steps": by_hand.adapter_steps,
    "measurements/equal_compute": by_hand.equal_compute,
    "measurements/expert_shares": by_hand.expert_shares,
    "measurements/dynamics": by_hand.dynamics,
    "measurements/first_roles": measured.first_roles,
    "measurements/kernels": measured.kernels,
    "measurements/kernels_h100": measured.kernels_h100,
    "measurements/kernels_liger": measured.kernels_liger,
    "measurements/methods": measured.methods,
    "measurements/out_of_memory": measured.out_of_memory,
    "measurements/peaks": measured.peaks,
    "measurements/published": measured.published,
    "measurements/role_changes": measured.role_changes,
    "measurements/several_cards": measured.peaks,
    "measurements/small_batches": by_hand.small_batches,
    "measurements/compiled_steps": by_hand.compiled_steps,
    "measurements/speeds": measured.speeds,
}


def problems(name: str, rows: pd.DataFrame, **known) -> list[str]:
    """What is wrong with a table, one sentence each with its row and column.

    Args:
        name: of `SCHEMAS`.
        rows: as text, an empty cell as "".
        known: what the schema asks for beside the table, such as the cells of the lessons.
    """
    return checking.problems(SCHEMAS[name](**known), rows, f"{name.split('/')[-1]}.csv")


def read(name: str, path: Path) -> pd.DataFrame:
    """A table of `SCHEMAS` from a file, its numbers as numbers.

    Raises:
        ValueError: something is wrong with it, in one sentence.
    """
    for sentence in problems(name, checking.text(path)):
        raise ValueError(sentence)
    return pd.read_csv(path)
