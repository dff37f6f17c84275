"""Every use of torch's private APIs, by theme, as small functions.

``plain_torch`` and ``plain_strides`` let a trace take the ways of a plain run. The contract test is
tests/capture/test_dynamo.py."""

from torch.utils import _pytree

from mtcompile.torch_private.autograd import (
    accumulating,
    accumulation_hooks,
    allow_clipping,
    caches_casts,
    cast_of,
    counting_losses,
    dispatch_mode,
    in_capture,
    keeps_graph,
    leaves_outside,
    move_to_front,
    refuse_clipping,
    saving_hook,
    shares_storage,
    storage_holders,
    storage_id,
)
from mtcompile.torch_private.dynamo import (
    break_after,
    capture_settings,
    cause_in_dynamo,
    failed_inside,
    gives_no_gradients,
    is_graph_break,
    leave_out_of_graphs,
    leaving_out_absent_gradients,
    mixing_devices,
    noting_arguments_of_checkpoints,
    raised_in_capture,
    refusing_random_numbers,
    returned_leaf,
    set_grad_enabled,
    tracing_new_leaves,
    without_break_warnings,
)
from mtcompile.torch_private.kernels import (
    AllocatorPeak,
    inductor,
    inductor_cache,
    probe_inductor,
    profiler_runs,
)
from mtcompile.torch_private.known_values import (
    OtherValues,
    expecting_values,
    taking_known_values,
)
from mtcompile.torch_private.lazy_modules import (
    after_initialization,
    initialize_root,
    initializing,
    lazy_modules,
)
from mtcompile.torch_private.numpy_calls import (
    computing_numpy,
)
from mtcompile.torch_private.raising_branches import (
    checking_branches,
)
from mtcompile.torch_private.thread_setting import one_at_a_time, process_lock
from mtcompile.torch_private.tracing import (
    LiveBytes,
    building_without_memory,
    changes_within,
    export_joint,
    fake_mode_of,
    joint_trace_key,
    lasting,
    plainly,
    tracing_joint,
    tracing_wide_grouped_products,
    without_memory,
)

pytree = _pytree  # as a public name

__all__ = [
    "AllocatorPeak",
    "LiveBytes",
    "OtherValues",
    "accumulating",
    "accumulation_hooks",
    "after_initialization",
    "allow_clipping",
    "break_after",
    "building_without_memory",
    "caches_casts",
    "capture_settings",
    "cast_of",
    "cause_in_dynamo",
    "changes_within",
    "checking_branches",
    "computing_numpy",
    "counting_losses",
    "dispatch_mode",
    "expecting_values",
    "export_joint",
    "failed_inside",
    "fake_mode_of",
    "gives_no_gradients",
    "in_capture",
    "inductor",
    "inductor_cache",
    "initialize_root",
    "initializing",
    "is_graph_break",
    "joint_trace_key",
    "keeps_graph",
    "lasting",
    "lazy_modules",
    "leave_out_of_graphs",
    "leaves_outside",
    "leaving_out_absent_gradients",
    "mixing_devices",
    "move_to_front",
    "noting_arguments_of_checkpoints",
    "one_at_a_time",
    "plainly",
    "probe_inductor",
    "process_lock",
    "profiler_runs",
    "pytree",
    "raised_in_capture",
    "refuse_clipping",
    "refusing_random_numbers",
    "returned_leaf",
    "saving_hook",
    "set_grad_enabled",
    "shares_storage",
    "storage_holders",
    "storage_id",
    "taking_known_values",
    "tracing_joint",
    "tracing_new_leaves",
    "tracing_wide_grouped_products",
    "without_break_warnings",
    "without_memory",
]
