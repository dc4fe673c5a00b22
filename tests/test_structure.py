"""The shape of the package: imports point down, the public names are what they should be."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import rekls_jax

PACKAGE = Path(rekls_jax.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
LEVELS = {
    "_checks": -1,
    "_types": 0,
    "_eigen": 1,
    "_inner": 1,
    "_factors": 1,
    "_matrix_view": 1,
    "_turns": 1,
    "_matrix_step": 2,
    "_routing": 2,
    "_layout": 3,
    "_collectives": 4,
    "_stacks": 4,
    "_eigenbasis": 4,
    "_eigh_split": 5,
    "_owners": 5,
    "_mesh": 5,
    "_dtype": 6,
    "_step": 6,
    "_weight_decay": 6,
    "_state_specs": 6,
    "_transform": 7,
    "_alias": 8,
}
# What stands for an idea of its own may first appear at this level.
FIRST = {"optax": 6, "jax.sharding": 3, "jax.lax": 4, "jax.shard_map": 5}


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree):
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_module_has_a_level():
    assert set(MODULES) == set(LEVELS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    for imported in imports(MODULES[name]):
        parts = imported.split(".")
        if parts[0] == "rekls_jax":
            assert LEVELS[parts[1]] < LEVELS[name], f"{name} imports {imported}"


@pytest.mark.parametrize("name", MODULES)
def test_ideas_appear_at_their_level(name):
    used = set(imports(MODULES[name])) | attributes(MODULES[name])
    for idea, level in FIRST.items():
        if LEVELS[name] < level:
            assert not any(use == idea or use.startswith(idea + ".") for use in used), f"{name} uses {idea}"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_short_enough_to_hold_one_idea(name):
    assert len((PACKAGE / f"{name}.py").read_text().splitlines()) <= 250


def test_public_names():
    assert sorted(rekls_jax.__all__) == [
        "Eigh",
        "MatrixDimensionNumbers",
        "Numerics",
        "OrthogonalIteration",
        "REFERENCE",
        "ReklsState",
        "flax_dimension_numbers",
        "rekls",
        "scale_by_rekls",
        "state_partition_specs",
    ]
    assert not {name for name in vars(rekls_jax) if not name.startswith("_")} - set(rekls_jax.__all__)
    for name in rekls_jax.__all__:
        assert inspect.getdoc(getattr(rekls_jax, name))


def test_defaults():
    parameters = inspect.signature(rekls_jax.rekls).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert defaults == {
        "b1": 0.9,
        "b2": 0.95,
        "shampoo_beta": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "mask": None,
        "weight_decay_method": "decoupled",
        "inner": "adam",
        "nesterov": False,
        "max_update_rms": 0.0,
        "factors": "kl",
        "eigenbasis": rekls_jax.Eigh(),
        "precondition_frequency": 1,
        "max_precond_dim": 8192,
        "numerics": rekls_jax.Numerics(),
        "dimension_numbers": None,
        "mu_dtype": None,
        "fallback": None,
        "param_specs": None,
        "mesh": None,
        "eigh_axes": None,
        "eigh_placement": "split",
    }
    shared = inspect.signature(rekls_jax.scale_by_rekls).parameters
    assert all(p.default == defaults[name] and p.kind == parameters[name].kind for name, p in shared.items())
    assert dataclasses.asdict(rekls_jax.Numerics()) == {
        "initial_eigenvalue": None,
        "eigenvalue_floor": 1e-2,
        "carry_second_moment": True,
        "round_off_floor": 256.0,
        "precision": "highest",
    }
    assert dataclasses.asdict(rekls_jax.REFERENCE) == {
        "initial_eigenvalue": 0.0,
        "eigenvalue_floor": 0.0,
        "carry_second_moment": False,
        "round_off_floor": 0.0,
        "precision": "highest",
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        rekls_jax.REFERENCE.precision = "high"  # type: ignore[misc]
