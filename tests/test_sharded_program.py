"""What the compiled step of many devices holds: few collectives, a share of the work, a part of the state."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import rekls_states, structure
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import mesh_of

from rekls_jax import REFERENCE, MatrixDimensionNumbers, rekls, scale_by_rekls, state_partition_specs
from rekls_jax._eigh_split import Group, assign
from rekls_jax._layout import Side, Sides
from rekls_jax._owners import plan

COLLECTIVE = r"= (?:\S+|\([^=]*\)) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


def compiled_step(shapes, spec, **options):
    """The step of `scale_by_rekls` on 8 devices, (data 2, tp 4), with all parameters lying as `spec` says."""
    mesh = mesh_of(8)
    tx = scale_by_rekls(param_specs=spec, mesh=mesh, **options)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    put = lambda tree, specs: jax.tree.map(  # noqa: E731
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)), tree, specs
    )
    specs = dict.fromkeys(shapes, spec)
    state = put(jax.eval_shape(tx.init, params), state_partition_specs(tx, params, specs))
    return jax.jit(tx.update, donate_argnums=1).lower(put(params, specs), state).compile()


def collectives(compiled):
    return len(re.findall(COLLECTIVE, compiled.as_text()))


def eighs(compiled):
    return len(re.findall(r'custom_call_target="lapack_\w+syevd', compiled.as_text()))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("tp"), pytest.param(P("data", "tp"), marks=pytest.mark.exhaustive)], ids=str)
def test_collectives_do_not_grow_with_the_number_of_equal_leaves(spec):
    # Over P devices: 1 stays divided, P and 2 P go whole to one device each, P + 1 do both.
    devices = 4 if spec == P("tp") else 8
    number = {
        leaves: collectives(compiled_step({f"w{i}": (16, 24) for i in range(leaves)}, spec))
        for leaves in (1, devices, devices + 1, 2 * devices)
    }
    assert number[1] <= (18 if spec == P("tp") else 24)
    assert number[devices] == number[2 * devices] <= 21
    assert number[devices + 1] <= number[1] + number[devices]


def test_replicated_leaves_exchange_bases_and_nothing_else():
    # Eigenvalues and eigenvectors, of two sizes.
    assert collectives(compiled_step({"a": (16, 24), "b": (16, 24)}, P())) == 4


@pytest.mark.slow
def test_work_and_memory_are_divided():
    one, many = (whole_step(devices) for devices in (1, 8))
    assert many.cost_analysis()["flops"] <= one.cost_analysis()["flops"] / 6  # outside the decompositions
    memory = many.memory_analysis()
    assert memory.temp_size_in_bytes <= one.memory_analysis().temp_size_in_bytes / 2
    # Its new bytes lie where the old ones were.
    state = jax.tree.leaves(scale_by_rekls().init({name: jnp.ones((64, 96)) for name in SIXTEEN}))
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in state if leaf.ndim == 2) // 8


SIXTEEN = "abcdefghijklmnop"


def whole_step(devices):
    """Of as many matrices as make two for each of eight devices, rows divided over so many devices, state donated."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",))
    tx = scale_by_rekls(param_specs=P("tp"), mesh=mesh)
    G = jax.device_put({name: jnp.ones((64, 96)) for name in SIXTEEN}, NamedSharding(mesh, P("tp")))
    return jax.jit(tx.update, donate_argnums=1).lower(G, tx.init(G)).compile()


def test_on_a_gpu_decompositions_are_batched_and_stay_there():
    tx, G = scale_by_rekls(), {name: jnp.ones((16, 24)) for name in "abc"}
    text = jax.jit(tx.update).trace(G, tx.init(G)).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"stablehlo.custom_call @(\w+)\(.*?-> (?:tuple<)?\(?tensor<([\dx]+)xf32>", text)
    assert sorted(shape for name, shape in calls if "syevd" in name) == ["3x16x16", "3x24x24"]
    assert not re.findall("callback|while|infeed|outfeed", text)


@pytest.mark.slow
@pytest.mark.parametrize(("leaves", "share"), [(2, 2), (4, 2), (6, 4)])
def test_each_device_decomposes_its_share(leaves, share):
    # Of `leaves` factors of each of two sizes over eight devices: as many slots as the device with the most work needs.
    compiled = compiled_step({f"w{i}": (16, 24) for i in range(leaves)}, P("tp"))
    tables = assign([Group(16, leaves, ("data", "tp")), Group(24, leaves, ("data", "tp"))], {"data": 2, "tp": 4})
    assert eighs(compiled) == sum(table.shape[1] for table in tables) <= share
    assert eighs(compiled_step({"w": (16, 24)}, P("tp"), eigh_placement="replicated")) == 2


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp"), P("data", "tp")], ids=str)
def test_no_whole_moment_or_factor_enters_or_leaves(spec):
    text = compiled_step({"w": (64, 96)}, spec).as_text()
    (entry,) = re.findall(r"^ENTRY .*?\n}", text, re.DOTALL | re.MULTILINE)
    (layout,) = re.findall(r"entry_computation_layout=\{(.*)", text.splitlines()[0])
    assert "f32[16,96]" in layout or "f32[64,24]" in layout or "f32[32,24]" in layout
    for whole in ("f32[64,96]", "f32[64,64]", "f32[96,96]"):
        assert whole not in layout
        assert f"{whole}" not in "".join(line for line in entry.splitlines() if "parameter(" in line)
    assert "input_output_alias" in text.splitlines()[0]


def test_init_makes_no_whole_factor():
    mesh = mesh_of(8)
    tx = scale_by_rekls(param_specs=P("tp"), mesh=mesh)
    params = {"w": jnp.ones((64, 96))}
    specs = state_partition_specs(tx, params, P("tp"))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    text = jax.jit(tx.init, out_shardings=shardings).lower(params).compile().as_text() or ""
    assert "f32[16,64]" in text
    assert not re.search(r"\w+\[(64,64|96,96)\]", text)
    state = tx.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    np.testing.assert_array_equal(state.Q_L["w"], np.eye(64))
    np.testing.assert_array_equal(state.Q_R["w"], np.eye(96))
    assert state.Q_R["w"].addressable_shards[0].data.shape == (24, 96)


def test_a_device_holds_its_part_of_the_state():
    params = {"a": jnp.ones((64, 96)), "b": jnp.ones((40, 24)), "odd": jnp.ones((16, 33))}
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    state = scale_by_rekls(param_specs=P("tp"), mesh=mesh).init(params)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    undivided = sum(leaf.nbytes for leaf in jax.tree.leaves((state.eig_L, state.eig_R, state.eigh_failures, state.count)))
    undivided += state.R["odd"].nbytes + state.Q_R["odd"].nbytes
    assert held == (whole - undivided) // 8 + undivided


GPT2 = 12 * [(768, 768)] * 2 + 12 * [(768, 2304), (768, 3072), (3072, 768)] + [(768, 1024)]


@pytest.mark.parametrize(("devices", "bound"), [(8, 1.1), (64, 1.3)])
def test_the_work_is_balanced(devices, bound):
    sizes = [size for shape in GPT2 for size in shape]
    groups = [Group(size, sizes.count(size), ("x",)) for size in sorted(set(sizes))]
    tables = assign(groups, {"x": devices})
    load = np.zeros(devices)
    for group, table in zip(groups, tables, strict=True):
        assert sorted(table[table >= 0]) == list(range(group.number))
        load += group.size**3 * (table >= 0).sum(axis=1)
    costs = [size**3 for size in sizes]
    assert load.max() <= bound * max(sum(costs) / devices, max(costs))


@pytest.mark.parametrize(("devices", "bound"), [(8, 1.1), (64, 1.3)])
def test_the_work_is_balanced_where_whole_matrices_go_to_their_owners(devices, bound):
    shapes = sorted(set(GPT2))
    stacks = [(sides_of(shape), GPT2.count(shape)) for shape in shapes]
    load, left = np.zeros(devices), []
    for shape, (_, number), handovers in zip(shapes, stacks, plan(stacks, {"x": devices}, ("x",)), strict=True):
        for handover in handovers:
            load += sum(size**3 for size in shape) * (handover.table >= 0).sum(axis=1)
        owned = np.concatenate([handover.table.ravel() for handover in handovers] or [np.array([], int)])
        assert sorted(owned[owned >= 0]) == list(range((owned >= 0).sum()))
        left += (number - (owned >= 0).sum()) * list(shape)
    groups = [Group(size, left.count(size), ("x",)) for size in sorted(set(left))]
    for group, table in zip(groups, assign(groups, {"x": devices}), strict=True):
        load += group.size**3 * (table >= 0).sum(axis=1)
    costs = [size**3 for shape in GPT2 for size in shape]
    assert load.sum() == sum(costs)
    assert load.max() <= bound * max(sum(costs) / devices, max(costs))


def sides_of(shape):
    """Rows divided over "x"."""
    rows, columns = Side(shape[:1], (("x",),)), Side(shape[1:], ((),))
    return Sides((), rows, columns, rows, Side(shape[1:], (("x",),)))


def test_who_owns_which():
    sides = sides_of((16, 24))
    tables = [
        [handover.table.tolist() for handover in handovers]
        for handovers in plan([(sides, k) for k in (1, 2, 3, 6, 9)], {"x": 4, "y": 2}, ("y", "x"))
    ]
    assert tables == [
        [],
        [[[0], [1], [-1], [-1]]],
        [[[2], [-1], [0], [1]]],  # who had none comes first
        [[[0], [1], [2], [3]], [[-1], [4], [5], [-1]]],
        [[[0, 1], [2, 3], [4, 5], [6, 7]]],  # one is too few: it stays divided
    ]
    assert plan([(sides, 8)], {"x": 4, "y": 2}, ("y",)) == [[]]
    assert plan([(sides, 8)], {"x": 1}, ("x",)) == [[]]


def test_work_over_some_axes_counts_for_every_device_that_does_it():
    # Three stacks of different places along "pipe" are decomposed at once; the matrix for all goes to who is idle.
    tables = assign([Group(8, 3, ("tp",)), Group(4, 1, ("pipe", "tp"))], {"pipe": 2, "tp": 4})
    assert [sorted(row) for row in tables[0]] == [[0], [1], [2], [-1]]
    np.testing.assert_array_equal(np.flatnonzero(tables[1][:, 0] == 0), [3])


def wrappers():
    def tx(**options):
        return rekls(0.1, mesh=mesh_of(8), param_specs={"w": P("tp"), "b": P()}, **options)

    return {
        "rekls": tx(),
        "chain": optax.chain(optax.scale(2.0), tx(inner="laprop")),
        "masked": optax.masked(tx(), {"w": True, "b": False}),
        "partition": optax.partition({"a": tx(), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
        "multi_steps": optax.MultiSteps(tx(), 2),
        "inject": optax.inject_hyperparams(rekls, static_args=("param_specs", "mesh"))(
            0.1, param_specs={"w": P("tp"), "b": P()}, mesh=mesh_of(8)
        ),
        "apply_if_finite": optax.apply_if_finite(tx(), 3),
        "schedule": rekls(optax.constant_schedule(0.1), param_specs={"w": P("tp"), "b": P()}, mesh=mesh_of(8)),
    }


@pytest.mark.parametrize("name", wrappers())
def test_specs_of_any_state_that_contains_ours(name):
    tx, params, mesh = wrappers()[name], {"w": jnp.ones((16, 33)), "b": jnp.ones(16)}, mesh_of(8)
    specs = state_partition_specs(tx, params, {"w": P("tp"), "b": P()})
    shapes = jax.eval_shape(tx.init, params)
    assert structure(specs) == structure(shapes)
    assert all(len(spec) <= shape.ndim for spec, shape in zip(jax.tree.leaves(specs), jax.tree.leaves(shapes), strict=True))
    (ours,) = rekls_states(specs)
    two = P("tp", None)
    assert [ours.count, ours.mu["w"], ours.nu["w"], ours.L["w"], ours.Q_L["w"]] == [P(), two, two, two, two]
    assert [ours.R["w"], ours.Q_R["w"], ours.eig_L["w"], ours.eig_R["w"]] == [P(None, None)] * 2 + [P(None)] * 2
    if name == "multi_steps":
        assert specs.acc_grads == {"w": two, "b": P(None)}
    update = jax.shard_map(
        lambda G, state, params: tx.update(G, state, params),
        mesh=mesh,
        in_specs=({"w": P("tp"), "b": P()}, specs, {"w": P("tp"), "b": P()}),
        out_specs=({"w": P("tp"), "b": P()}, specs),
        check_vma=name != "apply_if_finite",  # which decides per device: see the README
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    updates, _ = jax.jit(update)(params, state, params)
    assert np.isfinite(updates["w"]).all()


def test_specs_come_without_a_mesh_argument_too():
    params = {"w": jax.ShapeDtypeStruct((2, 16, 24), jnp.bfloat16)}
    numbers = MatrixDimensionNumbers(1, 2)
    with jax.set_mesh(mesh_of(8)):
        specs = state_partition_specs(rekls(0.1, dimension_numbers=numbers), params, P("data", None, "tp"))
    (ours,) = rekls_states(specs)
    assert [ours.L["w"], ours.eig_L["w"], ours.eigh_failures["w"]] == [P("data", "tp", None), P("data", None), P("data")]
    mesh = mesh_of(8, AxisType.Explicit)
    params = {"w": jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, P("tp")))}
    (ours,) = rekls_states(state_partition_specs(rekls(0.1), params, lambda params: jax.tree.map(lambda _: P("tp"), params)))
    assert ours.L["w"] == P("tp", None)


# Many small decompositions at once on a CPU whose cores are fewer than the devices: a batched kernel never comes back.
@pytest.mark.slow
def test_many_matrices_do_not_hang():
    shapes = {f"a{i}": (64, 64) for i in range(24)} | {f"b{i}": (128, 128) for i in range(16)}
    tx = scale_by_rekls(param_specs=P("tp"), mesh=Mesh(np.array(jax.devices()), ("tp",)), numerics=REFERENCE)
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    gradients = {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(5):
        updates, state = update(gradients, state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
