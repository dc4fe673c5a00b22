"""Checkpoints of a run with Orbax: written while it goes on, restored onto any mesh, refused where they do not fit."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """Those of one run in `folder`, the last two. Whatever ends the process in the middle of a save leaves a whole one.

    Args:
      folder: made if it is not there.
      settings: of the run, by the names that its user knows; one with others is not continued.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self._settings = folder, settings
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            item_names=("state", "run"),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(max_to_keep=2),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: Any) -> None:
        self._manager.close()  # waits for the last save

    def latest(self) -> int | None:
        """The step of the last whole checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """`state`, arrays however they are divided, and `progress`, what JSON holds. The run may go on at once."""
        run = {"settings": self._settings, "progress": progress}
        self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run)))

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """The last whole checkpoint's state and progress.

        `like`, arrays or `jax.ShapeDtypeStruct`, says how the state must be and where its arrays go, whatever devices and
        mesh they came from.
        """
        step = self._manager.latest_step()
        where = self.folder / str(step)
        run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        for name, value in self._settings.items():
            if run["settings"].get(name) != value:
                raise ValueError(f"{where} was written with {name} {run['settings'].get(name)}, got {value}")
        check_fits(str(where), self._manager.item_metadata(step).state.tree, like)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        return restored.state, run["progress"]


def check_fits(where: str, saved: Any, like: Any) -> None:
    """ValueError that names a leaf in which the two trees differ.

    Orbax itself refuses other shapes without a name, and converts to another dtype without a word.
    """
    there, wanted = _leaves(saved), _leaves(like)
    for name in sorted(wanted.keys() | there.keys()):
        if name not in there:
            raise ValueError(f"{where} has no {name}, which this run has")
        if name not in wanted:
            raise ValueError(f"{where} has {name}, which this run has not")
    for name, (shape, dtype) in wanted.items():
        if there[name] != (shape, dtype):
            raise ValueError(f"in {where}, {name} is {_array(*there[name])}, in this run {_array(shape, dtype)}")


def _leaves(tree: Any) -> dict[str, tuple[Any, Any]]:
    """Shape and dtype by name. A dictionary without entries counts: its name says something."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, dict) and not node)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
        for path, leaf in leaves
    }


def _array(shape: Any, dtype: Any) -> str:
    return f"an array of shape {shape} and dtype {dtype}"
