"""What runs in the peers' own Python: places costs with other packages and says how long that took.

    PYTHON _peer_program.py CASES.json

CASES.json is `{"repeat": r, "cases": [{"costs": [...], "ranks": k, "equal": bool}, ...]}`. Printed is one JSON object:
`absent` names the packages that cannot be used here and why; `found` has for each case, by peer, the placement (`rank`)
and the thread CPU time of the peer's own call (`cpu_us`), or why there is none (`error`). Uses nothing of evenload.
"""

import ast
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

Place = Callable[[list[int], int, bool], list[list[int]]]
_REPEAT_BELOW_S = 0.2


def _verl() -> dict[str, tuple[Place, int]]:
    """Run the functions of verl's file; what it imports besides the standard library is not needed by them."""
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        msg = "No module named 'verl'"
        raise ImportError(msg)
    path = Path(spec.origin).parent / "utils" / "seqlen_balancing.py"
    tree = ast.parse(path.read_text())
    names: dict[str, object] = {"__name__": "seqlen_balancing"}
    for node in tree.body:
        future = ast.parse("from __future__ import annotations").body
        try:
            code = compile(ast.Module(body=[*future, node], type_ignores=[]), str(path), "exec")
            exec(code, names)
        except ImportError:
            continue
    partitions = names["get_seqlen_balanced_partitions"]
    return {"verl": (lambda costs, ranks, equal: partitions(costs, ranks, equal), 400_000)}


def _prtpy() -> dict[str, tuple[Place, int]]:
    import prtpy

    def run(name: str) -> Place:
        def place(costs: list[int], ranks: int, _: bool) -> list[list[int]]:
            algorithm = getattr(prtpy.partitioning, name)
            items = dict(enumerate(costs))
            return prtpy.partition(algorithm=algorithm, numbins=ranks, items=items, outputtype=prtpy.out.Partition)

        return place

    return {
        "prtpy_greedy": (run("greedy"), 50_000),
        "prtpy_kk": (run("kk"), 50_000),
        "prtpy_multifit": (run("multifit"), 5_000),
    }


def _numberpartitioning() -> dict[str, tuple[Place, int]]:
    import numberpartitioning

    def run(name: str) -> Place:
        function = getattr(numberpartitioning, name)
        return lambda costs, ranks, _: function(costs, num_parts=ranks, return_indices=True).partition

    return {"numberpartitioning_kk": (run("karmarkar_karp"), 50_000)}


def _binpacking() -> dict[str, tuple[Place, int]]:
    import binpacking

    def place(costs: list[int], ranks: int, _: bool) -> list[list[int]]:
        return [list(part) for part in binpacking.to_constant_bin_number(dict(enumerate(costs)), ranks)]

    return {"binpacking": (place, 50_000)}


_PACKAGES = {"verl": _verl, "prtpy": _prtpy, "numberpartitioning": _numberpartitioning, "binpacking": _binpacking}
_EQUAL = {"verl"}  # the peers that can keep counts equal


def _run(place: Place, case: dict, repeat: int) -> dict:
    times: list[float] = []
    for _ in range(repeat):
        begin = time.thread_time()
        parts = place(list(case["costs"]), case["ranks"], case["equal"])
        times.append(time.thread_time() - begin)
        if times[0] > _REPEAT_BELOW_S:
            break
    rank = [-1] * len(case["costs"])
    for number, items in enumerate(parts):
        for item in items:
            rank[item] = number
    if -1 in rank:
        msg = "an item is on no rank"
        raise ValueError(msg)
    return {"rank": rank, "cpu_us": 1e6 * statistics.median(times)}


def main() -> None:
    """Run every peer that is here on every case that it can do in reasonable time."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    peers: dict[str, tuple[Place, int]] = {}
    absent: dict[str, str] = {}
    for package, load in _PACKAGES.items():
        try:
            peers |= load()
        except Exception as error:
            absent[package] = f"{type(error).__name__}: {error}"
    found = []
    for case in asked["cases"]:
        results: dict[str, dict] = {}
        for peer, (place, most) in peers.items():
            if len(case["costs"]) * case["ranks"] > most or (case["equal"] and peer not in _EQUAL):
                continue
            try:
                results[peer] = _run(place, case, asked["repeat"])
            except Exception as error:
                results[peer] = {"error": f"{type(error).__name__}: {error}"}
        found.append(results)
    json.dump({"absent": absent, "found": found}, sys.stdout)


if __name__ == "__main__":
    main()
