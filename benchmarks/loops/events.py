"""What loops do, as source text: each kind of event, where in a step it may stand, and what it needs.

The names that a text may use: ``model``, ``optimizer``, ``x`` (the last batch), ``result`` (what the model returned), ``out``,
``hidden``, ``loss``, ``compiled``; ``see(label, value)`` notes what must be equal. ``$batch``, ``$call`` and others stand for
what depends on the model; ``$p``, ``$q``, ``$m`` for a parameter that a forward uses once, any parameter, and a module.
"""

from __future__ import annotations

from dataclasses import dataclass

SETUP, READY = "setup", "ready"
START, FORWARDED, BACKWARDED, STEPPED, END = "start", "forwarded", "backwarded", "stepped", "end"
IN_STEP = (START, FORWARDED, BACKWARDED, STEPPED, END)
ANYWHERE = (READY, *IN_STEP)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event. ``places``: where it is inserted; ``instead``: or which event of the plain loop it replaces; ``needs``:
    what the program must be, see ``draw``; ``setup``: lines before the model is compiled; ``reads``: it shows weights or
    optimizer state, which updates in the backward have changed before ``step`` (docs/guarantees.md); ``then``: an event of the
    same step that goes with it, and its place."""

    text: str
    places: tuple[str, ...] = ()
    instead: str = ""
    needs: tuple[str, ...] = ()
    setup: str = ""
    weight: int = 2
    reads: bool = False
    then: tuple[str, str] = ("", "")


def _for_gradients(line: str) -> str:
    return f"for p in model.parameters():\n    if p.grad is not None:\n        {line}"


_SEE_GRADIENTS = "see('gradients', {name: p.grad for name, p in model.named_parameters()})"
_SEE_WEIGHTS = "see('weights', dict(model.named_parameters()))"
_SEE_ALL = """see('weights', dict(model.named_parameters()))
see('buffers', dict(model.named_buffers()))
see('optimizer', optimizer.state_dict())
$see_kept
see('generator', torch.get_rng_state())"""
_CLIP = "see('norm', nn.utils.clip_grad_norm_(model.parameters(), 0.1))"
_CLOSURE = """x = $batch
def closure():
    optimizer.zero_grad()
    result = model(x)
    $unpack
    loss = $loss$term
    loss.backward()
    return loss
see('closure', optimizer.step(closure))"""
_GAN = """fake = generator($batch)
result = model(fake)
$unpack_fake
loss = -($loss_fake)
loss.backward()
see('generator gradients', [p.grad for p in generator.parameters()])
g_optimizer.step()
g_optimizer.zero_grad()"""
_GENERATOR = "generator = nn.Linear(8, 8)\ng_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)"
_SCALER = "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)"
_SCHEDULER = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"
_SAVED = "saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))"
_AVERAGE = "average = {name: p.data.clone() for name, p in model.named_parameters()}"
_STATES = (
    "for state in optimizer.state.values():\n    for value in state.values():\n        if torch.is_tensor(value):\n            "
)

EVENTS: dict[str, Kind] = {
    # The plain loop.
    "forward": Kind("x = $batch\n$call\nsee('loss', loss)"),
    "backward": Kind("loss.backward()"),
    "step": Kind("optimizer.step()"),
    "clipped_step": Kind(
        "if not compiled:\n    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"
        "optimizer.step()\nsee('norm', float(model.grad_norm if compiled else norm))"
    ),
    "zero_grad": Kind("optimizer.zero_grad()"),
    "see_gradients": Kind(_SEE_GRADIENTS),
    "see_weights": Kind(_SEE_WEIGHTS),
    "see_input": Kind("see('input', x.grad)"),
    "see_hidden": Kind("see('hidden gradient', hidden.grad)"),
    "see_stored": Kind("see('stored gradient', $s.grad)"),
    "hook_removed": Kind("handle.remove()"),
    "see_all": Kind(_SEE_ALL),
    # Other forwards.
    "other_size": Kind("x = $other\n$call\nsee('loss', loss)", instead="forward", weight=3),
    "see_outputs": Kind(
        "x = $batch\n$call\nsee('loss', loss)\nsee('out', out)\n"
        "see('layout', (tuple(out.shape), out.stride(), out.requires_grad))",
        instead="forward",
        weight=4,
    ),
    "input_gradient": Kind(
        "x = $batch.requires_grad_()\n$call\nsee('loss', loss)",
        instead="forward",
        needs=("floats",),
        weight=3,
        then=("see_input", BACKWARDED),
    ),
    "with_term": Kind(
        "x = $batch\n$call\nloss = loss + $term\nsee('loss', loss)", instead="forward", needs=("terms",), weight=4
    ),
    "outside_penalty": Kind(
        "x = $batch\n$call\nloss = loss + 0.1 * $p.square().sum()\nsee('loss', loss)",
        instead="forward",
        needs=("once",),
        weight=3,
    ),
    "two_forwards": Kind(
        "x = $batch\n$call\nfirst = loss\nx = $batch\n$call\nloss = loss + first\nsee('loss', loss)",
        instead="forward",
        needs=("unrepeated",),
        weight=3,
    ),
    "dropped_forward": Kind("x = $batch\n$call\nx = $batch\n$call\nsee('loss', loss)", instead="forward"),
    "deleted_loss": Kind("x = $batch\n$call\ndel loss, result, out\nx = $batch\n$call", instead="forward", weight=1),
    "autocast": Kind(
        "x = $batch\nwith torch.autocast('cpu', dtype=torch.bfloat16):\n    $call_indented\nsee('loss', loss)",
        instead="forward",
        needs=("unrepeated",),
        weight=3,
    ),
    "keyword_call": Kind("x = $batch\nresult = model(x=x)\n$unpack\nloss = $loss", instead="forward", weight=1),
    "scaled_loss": Kind("x = $batch\n$call\nloss = loss / 2\nsee('loss', loss)", instead="forward"),
    "own_generator": Kind("torch.manual_seed(5)\nx = $batch\n$call\nsee('loss', loss)", instead="forward", weight=1),
    # Other backwards.
    "backward_twice": Kind("loss.backward(retain_graph=True)\nloss.backward()", instead="backward"),
    "retained": Kind("loss.backward(retain_graph=True)", instead="backward", weight=1),
    "two_losses": Kind("loss.backward(retain_graph=True)\n(0.1 * out.sum()).backward()", instead="backward", needs=("out",)),
    "backward_inputs": Kind("loss.backward(inputs=[$q])", instead="backward"),
    "backward_inputs_all": Kind("loss.backward(inputs=list(model.parameters()))", instead="backward", weight=1),
    "backward_scaled": Kind("loss.backward(torch.tensor(0.5))", instead="backward"),
    "autograd_grad": Kind(
        "weights = [p for p in model.parameters() if p.requires_grad]\n"
        "for p, gradient in zip(weights, torch.autograd.grad(loss, weights, allow_unused=True)):\n    p.grad = gradient",
        instead="backward",
    ),
    "autograd_grad_one": Kind("see('gradient', torch.autograd.grad(loss, $q, retain_graph=True)[0])", (FORWARDED,)),
    "autograd_grad_hidden": Kind(
        "see('gradient', torch.autograd.grad(loss, hidden, retain_graph=True)[0])", (FORWARDED,), needs=("hidden",)
    ),
    "penalty": Kind(
        "points = $batch.requires_grad_()\nresult = model(points)\n$unpack_points\n"
        "(slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)\n"
        "penalty = slope.square().mean()\nsee('penalty', penalty)\npenalty.backward()",
        (START, BACKWARDED),
        needs=("floats", "out", "unrepeated"),
    ),
    "second_batch": Kind("x = $batch\n$call\nloss.backward()", (BACKWARDED,), weight=3),
    "scaler": Kind(
        "scaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
        instead="backward",
        setup=_SCALER,
    ),
    "scaler_clipped": Kind(
        f"scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n{_CLIP}\nscaler.step(optimizer)\nscaler.update()",
        instead="backward",
        setup=_SCALER,
        weight=1,
    ),
    # Other steps.
    "closure": Kind(_CLOSURE.replace("$term", ""), instead="step", weight=3),
    "closure_penalty": Kind(_CLOSURE.replace("$term", " + 0.1 * $p.square().sum()"), instead="step", needs=("once",)),
    "closure_loss": Kind("optimizer.step(lambda: loss)", instead="step", weight=1),
    "no_step": Kind("pass", instead="step"),
    "step_again": Kind("optimizer.step()", (STEPPED, END)),
    "hand_step": Kind(
        "with torch.no_grad():\n    for p in model.parameters():\n"
        "        if p.grad is not None:\n            p.sub_(0.1 * p.grad)",
        instead="step",
        weight=1,
    ),
    # Zeroing gradients.
    "model_zero_grad": Kind("model.zero_grad()", instead="zero_grad", weight=3),
    "zero_in_place": Kind("optimizer.zero_grad(set_to_none=False)", instead="zero_grad", weight=3),
    "model_zero_in_place": Kind("model.zero_grad(set_to_none=False)", instead="zero_grad", weight=1),
    "no_zero_grad": Kind("pass", instead="zero_grad", weight=3),
    "zero_by_hand": Kind("for p in model.parameters():\n    p.grad = None", instead="zero_grad", weight=1),
    "zero_anywhere": Kind("optimizer.zero_grad()", IN_STEP, weight=3),
    "zero_in_place_anywhere": Kind("optimizer.zero_grad(set_to_none=False)", IN_STEP, weight=1),
    "zero_one": Kind("$q.grad = None", (START, FORWARDED, BACKWARDED)),
    # Gradients between backward and step.
    "clip": Kind(_CLIP, (BACKWARDED,), weight=4),
    "clip_value": Kind("nn.utils.clip_grad_value_(model.parameters(), 0.01)", (BACKWARDED,)),
    "clip_total": Kind(
        "norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])\n"
        "nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)",
        (BACKWARDED,),
    ),
    "read_gradients": Kind(_SEE_GRADIENTS, IN_STEP),
    "read_norms": Kind(
        "see('norms', [p.grad.norm() for p in model.parameters() if p.grad is not None])", (BACKWARDED, STEPPED)
    ),
    "scale_gradients": Kind(_for_gradients("p.grad.mul_(0.5)"), (BACKWARDED,)),
    "scale_gradients_data": Kind(_for_gradients("p.grad.data *= 0.5"), (BACKWARDED,), weight=1),
    "replace_gradients": Kind(_for_gradients("p.grad = p.grad * 0.5"), (BACKWARDED,)),
    "own_gradient": Kind("$q.grad = torch.ones_like($q)", (START, BACKWARDED)),
    "keep_gradients": Kind("kept = [p.grad for p in model.parameters()]", (BACKWARDED,), weight=1),
    # Optimizers.
    "rate_lower": Kind("optimizer.param_groups[0]['lr'] *= 0.5", IN_STEP, weight=3),
    "decay_changed": Kind("optimizer.param_groups[0]['weight_decay'] = 0.1", IN_STEP),
    "schedule": Kind("scheduler.step()", IN_STEP, setup=_SCHEDULER, weight=3),
    "new_optimizer": Kind("optimizer = torch.optim.SGD(model.parameters(), lr=0.05)", IN_STEP),
    "bound_optimizer": Kind(
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\nif hasattr(model, 'bind'):\n    model.bind(optimizer)",
        IN_STEP,
    ),
    "other_optimizer": Kind(
        "second = torch.optim.SGD(model.parameters(), lr=0.05)\nsecond.step()", (BACKWARDED, STEPPED), weight=1
    ),
    "read_states": Kind("see('states', list(optimizer.state.values()))", IN_STEP, reads=True),
    "change_states": Kind(f"{_STATES}value.mul_(0.5)", IN_STEP, needs=("float_states",)),
    "clear_states": Kind("optimizer.state.clear()", (START, END), weight=1),
    "step_pre_hook": Kind(
        "def scale(optimizer, args, kwargs):\n    for group in optimizer.param_groups:\n        for p in group['params']:\n"
        "            if p.grad is not None:\n                p.grad.mul_(0.1)\noptimizer.register_step_pre_hook(scale)",
        (SETUP, READY, START),
    ),
    "step_post_hook": Kind(
        "def decay(optimizer, args, kwargs):\n    with torch.no_grad():\n        for group in optimizer.param_groups:\n"
        "            for p in group['params']:\n                p.mul_(0.99)\noptimizer.register_step_post_hook(decay)",
        (SETUP, READY, START),
    ),
    "group_added": Kind(
        "extra = nn.Parameter(torch.ones(3))\noptimizer.add_param_group({'params': [extra], 'lr': 0.1})", (READY, END), weight=1
    ),
    # Freezing.
    "freeze": Kind("$m.requires_grad_(False)", (SETUP, *ANYWHERE), weight=3),
    "freeze_one": Kind("$q.requires_grad_(False)", ANYWHERE, weight=1),
    "unfreeze": Kind("model.requires_grad_(True)", (START, BACKWARDED, END), weight=1),
    # Weights.
    "in_place_weight": Kind("with torch.no_grad():\n    $q.mul_(0.9)", ANYWHERE, weight=3),
    "data_weight": Kind("$q.data.clamp_(-0.2, 0.2)", (READY, START, BACKWARDED, STEPPED, END)),
    "data_weight_between": Kind("$q.data.mul_(0.5)", (FORWARDED,), weight=1),
    "averaged": Kind(
        "backup = {}\nfor name, p in model.named_parameters():\n    average[name] = 0.9 * average[name] + 0.1 * p.data\n"
        "    backup[name], p.data = p.data, average[name]\nwith torch.no_grad():\n    see('averaged', model($probe))\n"
        "for name, p in model.named_parameters():\n    p.data = backup[name]",
        (START, STEPPED, END),
        setup=_AVERAGE,
    ),
    "lerp_average": Kind(
        "with torch.no_grad():\n    for name, p in model.named_parameters():\n        average[name].lerp_(p, 0.1)\n"
        "see('average', average)",
        (STEPPED, END),
        setup=_AVERAGE,
    ),
    "held": Kind("see('held', held)", (END,), setup="held = [p.data for p in model.parameters()]", weight=1),
    "outside_backward": Kind("(0.1 * $q.square().sum()).backward()", (START, BACKWARDED), weight=1),
    # Saving and loading.
    "load_model": Kind("model.load_state_dict(saved[0])", IN_STEP, setup=_SAVED),
    "load_optimizer": Kind("optimizer.load_state_dict(saved[1])", IN_STEP, setup=_SAVED),
    "load_both": Kind(
        "model.load_state_dict(saved[0])\noptimizer.load_state_dict(saved[1])", (START, STEPPED, END), setup=_SAVED
    ),
    "save": Kind(_SAVED, (START, STEPPED, END), setup=_SAVED),
    "see_states": Kind(
        "see('model state', model.state_dict())\nsee('optimizer state', optimizer.state_dict())", IN_STEP, reads=True
    ),
    "reloaded": Kind(
        "states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))\nwith torch.no_grad():\n"
        "    for p in model.parameters():\n        p.zero_()\n"
        "model.load_state_dict(states[0])\noptimizer.load_state_dict(states[1])",
        (END,),
        weight=1,
    ),
    "copied": Kind("with torch.no_grad():\n    see('copied', copy.deepcopy(model)($probe))", (END,), weight=1),
    # Calls without gradients, and modes.
    "evaluated": Kind(
        "model.eval()\nwith torch.no_grad():\n    see('evaluated', model($probe))\nmodel.train()",
        ANYWHERE,
        weight=4,
        reads=True,
    ),
    "evaluated_with_gradients": Kind(
        "model.eval()\nsee('evaluated', model($probe))\nmodel.train()", (START, END), weight=1, reads=True
    ),
    "train_no_grad": Kind("with torch.no_grad():\n    see('no_grad', model($probe))", ANYWHERE, reads=True),
    "inference": Kind(
        "with torch.inference_mode():\n    see('inference', model($probe))", (START, BACKWARDED, END), weight=1, reads=True
    ),
    "eval_mode": Kind("model.eval()", (READY, START, END), weight=1),
    "setting": Kind("model.$setting", ANYWHERE, needs=("setting",), weight=2),
    "seeded": Kind("torch.manual_seed(3)", (FORWARDED, BACKWARDED), weight=1),
    # Hooks.
    "parameter_hook": Kind("$q.register_hook(lambda gradient: gradient * 0.5)", (SETUP, READY, START, FORWARDED), weight=3),
    "parameter_hook_reads": Kind("$q.register_hook(lambda gradient: see('hook', gradient))", (SETUP, READY, START), weight=1),
    "accumulated_hook": Kind(
        "$q.register_post_accumulate_grad_hook(lambda p: see('accumulated', p.grad))", (SETUP, READY, START)
    ),
    "accumulated_hook_steps": Kind(
        "def apply(p):\n    with torch.no_grad():\n        p.sub_(0.1 * p.grad)\n    p.grad = None\n"
        "$q.register_post_accumulate_grad_hook(apply)",
        (SETUP, READY, START),
        weight=1,
    ),
    "module_hook": Kind(
        "model.head.register_forward_hook(lambda module, args, output: output * 1.5)", (SETUP, READY, *IN_STEP), weight=2
    ),
    "module_pre_hook": Kind(
        "model.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))", (SETUP, READY, START)
    ),
    "model_hook": Kind(
        "model.register_forward_hook(lambda module, args, output: see('hooked', output))", (SETUP, READY, START), weight=1
    ),
    "model_pre_hook": Kind(
        "model.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))", (READY, START), needs=("floats",), weight=1
    ),
    "global_hook": Kind(
        "see.handles.append(nn.modules.module.register_module_forward_hook(\n"
        "    lambda module, args, output: output * 0.9 if isinstance(module, nn.Linear) else None))",
        (SETUP, READY, START),
        weight=1,
    ),
    "module_backward_hook": Kind(
        "model.head.register_full_backward_hook(lambda module, given, received: see('module', received[0]))",
        (SETUP, READY),
        weight=1,
    ),
    "loss_hook": Kind("loss.register_hook(lambda gradient: gradient * 2)", (FORWARDED,)),
    "out_hook": Kind("out.register_hook(lambda gradient: see('out gradient', gradient))", (FORWARDED,), needs=("out",)),
    "out_hook_scales": Kind("out.register_hook(lambda gradient: gradient * 0.5)", (FORWARDED,), needs=("out",)),
    "hidden_hook": Kind(
        "hidden.register_hook(lambda gradient: see('hidden gradient', gradient))", (FORWARDED,), needs=("hidden",)
    ),
    "hidden_hook_scales": Kind("hidden.register_hook(lambda gradient: gradient * 0.5)", (FORWARDED,), needs=("hidden",)),
    "retain_grad": Kind("hidden.retain_grad()", (FORWARDED,), needs=("hidden",), then=("see_hidden", BACKWARDED)),
    "retain_grad_out": Kind(
        "out.retain_grad()\nhidden = out", (FORWARDED,), needs=("out",), then=("see_hidden", BACKWARDED), weight=1
    ),
    "stored_retained": Kind("$s.retain_grad()", (FORWARDED,), needs=("stored",), weight=10, then=("see_stored", BACKWARDED)),
    "stored_hook": Kind("$s.register_hook(lambda gradient: gradient * 0.5)", (FORWARDED,), needs=("stored",), weight=10),
    "stored_grad": Kind(
        "see('gradient', torch.autograd.grad(loss, $s, retain_graph=True)[0])", (FORWARDED,), needs=("stored",), weight=10
    ),
    "temporary_hook": Kind(
        "handle = model.head.register_forward_hook(lambda module, args, output: output * 1.5)",
        (START,),
        then=("hook_removed", END),
    ),
    "temporary_parameter_hook": Kind(
        "handle = $q.register_hook(lambda gradient: gradient * 0.5)", (START, FORWARDED), then=("hook_removed", END), weight=1
    ),
    # What surrounds or replaces calls.
    "bad_call": Kind("try:\n    model(torch.ones(4, 5))\nexcept Exception:\n    pass", ANYWHERE, needs=("pure",)),
    "function_mode": Kind(
        "class Halved(torch.overrides.TorchFunctionMode):\n"
        "    def __torch_function__(self, function, types, args=(), kwargs=None):\n"
        "        result = function(*args, **(kwargs or {}))\n"
        "        return result * 0.5 if function is F.linear else result\n"
        "x = $batch\nwith Halved():\n    $call_indented\nsee('loss', loss)",
        instead="forward",
        weight=1,
    ),
    "forward_replaced": Kind(
        "Model.forward = lambda self, x, before=Model.forward: before(self, -x)",
        (READY, START, END),
        needs=("floats",),
        weight=1,
    ),
    "own_forward": Kind(
        "model.head.forward = lambda rows, before=model.head.forward: before(rows) * 0.5",
        (SETUP, READY, START),
        weight=1,
    ),
    "functional_call": Kind(
        "weights = {name: p.detach() * 0.5 for name, p in model.named_parameters()}\n"
        "see('functional', torch.func.functional_call(model, weights, ($probe,)))",
        (READY, START, END),
        weight=1,
    ),
    "functional_gradients": Kind(
        "weights = {name: p.detach().clone() for name, p in model.named_parameters()}\n"
        "def loss_of(weights):\n    result = torch.func.functional_call(model, weights, (x,))\n    $unpack_indented\n"
        "    return $loss\n"
        "see('functional', torch.func.grad(loss_of)(weights))",
        (STEPPED, END),
        weight=1,
    ),
    "forward_mode": Kind(
        "with torch.autograd.forward_ad.dual_level():\n"
        "    result = model(torch.autograd.forward_ad.make_dual($batch, torch.ones(4, 8)))\n    $unpack_indented\n"
        "    see('tangent', torch.autograd.forward_ad.unpack_dual(out).tangent)",
        (READY, START, END),
        needs=("floats", "out"),
        weight=1,
    ),
    "batched_gradients": Kind(
        "see('batched', torch.autograd.grad(out, $q, torch.ones(2, *out.shape), is_grads_batched=True, retain_graph=True)[0])",
        (FORWARDED,),
        needs=("out",),
        weight=1,
    ),
    "module_replaced": Kind("model.head = nn.Linear(8, $width)", (READY, END), needs=("free_head",), weight=1),
    "parameter_replaced": Kind(
        "model.head.weight = nn.Parameter(model.head.weight.detach() * 0.5)",
        (READY, START, END),
        needs=("free_head",),
        weight=1,
    ),
    "vector_weights": Kind(
        "nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.9, model.parameters())",
        (READY, START, END),
        weight=1,
    ),
    "averaged_model": Kind(
        "averaged_model.update_parameters(model)\nsee('averaged model', dict(averaged_model.named_parameters()))",
        (STEPPED, END),
        setup="averaged_model = torch.optim.swa_utils.AveragedModel(model)",
        weight=1,
    ),
    "detect_anomaly": Kind(
        "with torch.autograd.detect_anomaly(check_nan=False):\n    loss.backward()", instead="backward", weight=1
    ),
    "backward_list": Kind("torch.autograd.backward([loss, 0.5 * loss])", instead="backward", weight=1),
    "backward_created": Kind(
        "loss.backward(create_graph=True)\nfor p in model.parameters():\n    if p.grad is not None:\n"
        "        p.grad = p.grad.detach()",
        instead="backward",
        needs=("unrepeated",),
        weight=1,
    ),
    "infinite_loss": Kind(
        "x = $batch\n$call\nloss = loss * float('inf')\nsee('loss', loss)", instead="forward", needs=("not_skipped",), weight=1
    ),
    # Other models.
    "gan": Kind(_GAN, (END,), needs=("floats",), setup=_GENERATOR, weight=1),
    "gan_frozen": Kind(
        f"model.requires_grad_(False)\n{_GAN}\nmodel.requires_grad_(True)", (END,), needs=("floats",), setup=_GENERATOR
    ),
    "followed": Kind(
        "x = $batch\nresult = model(x)\n$unpack\nloss = follower(out).square().mean()\nsee('loss', loss)",
        instead="forward",
        needs=("out", "rows"),
        setup="follower = nn.Linear($width, 3)",
        weight=1,
    ),
}
