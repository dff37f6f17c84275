"""The modules of drawn models, as source text: what ``__init__`` and ``forward`` say of each layer.

A layer takes and gives ``h``, rows of 8 numbers. ``$i`` stands for the layer's number, so names are unique in a model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """A kind of layer. ``once``: parameters that a forward uses once, which terms outside the model may be added to;
    ``repeats``: some are used several times, so gradients are added up use by use (see docs/guarantees.md); ``setting``: an
    attribute that a loop may change, as an assignment; ``kept``: a tensor beside parameters and buffers that it leaves."""

    init: str = ""
    forward: str = ""
    helper: str = ""
    once: str = ""
    repeats: bool = False
    setting: str = ""
    kept: str = ""
    weight: int = 2


_LINEAR = "self.l$i = nn.Linear(8, 8)"

_WATCH = '''
class Watch(torch.autograd.Function):
    """Notes the largest gradient in a buffer, as for delayed scaling."""

    @staticmethod
    def forward(ctx, values, largest):
        ctx.largest = largest
        return values * largest

    @staticmethod
    def backward(ctx, gradient):
        ctx.largest.mul_(0.9).add_(0.1 * gradient.abs().amax())
        return gradient * 2, None
'''
_FUSED = '''
class Fused(torch.autograd.Function):
    """Adds the gradient of its weight to an accumulator of the weight."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return rows @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        rows, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ rows)
        return gradient @ weight, None
'''
_COUNT = '''
class Count(torch.autograd.Function):
    """Adds the size of its gradient to a tensor that forward made."""

    @staticmethod
    def forward(ctx, rows, seen):
        ctx.save_for_backward(seen)
        return rows * 2

    @staticmethod
    def backward(ctx, gradient):
        (seen,) = ctx.saved_tensors
        seen.add_(gradient.abs().mean())
        return gradient.clone(), None
'''
_THROUGH = '''
class Through(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx, rows):
        return (rows * 4).round() / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1)
'''
_NOTED = '''
class Noted(nn.Module):
    """Keeps a running norm of the gradients of what passes through it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("norm", torch.zeros(()))

    def note(self, gradient):
        self.norm.mul_(0.9).add_(0.1 * gradient.norm())

    def forward(self, rows):
        rows = rows * 1.5
        if rows.requires_grad:
            rows.register_hook(self.note)
        return rows
'''
_SYMMETRIC = """
class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()
"""

LAYERS: dict[str, Layer] = {
    "linear": Layer(_LINEAR, "h = torch.tanh(self.l$i(h))", once="l$i", weight=6),
    "residual": Layer(_LINEAR, "h = h + torch.relu(self.l$i(h))", once="l$i", weight=4),
    "mlp": Layer(
        "self.l$i = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False))",
        "h = h + self.l$i(h)",
        once="l$i[0]",
    ),
    "layer_norm": Layer("self.l$i = nn.LayerNorm(8)", "h = self.l$i(h)", once="l$i"),
    "batch_norm": Layer("self.l$i = nn.BatchNorm1d(8)", "h = self.l$i(h)", once="l$i", weight=3),
    "dropout": Layer("self.l$i = nn.Dropout(0.2)", "h = self.l$i(h)", setting="l$i.p = 0.5", weight=3),
    "noise": Layer(forward="h = h + 0.1 * torch.randn_like(h) if self.training else h"),
    "convolution": Layer(
        "self.l$i = nn.Conv1d(1, 2, 3, padding=1)", "h = torch.tanh(self.l$i(h.unsqueeze(1)).sum(1))", once="l$i"
    ),
    "attention": Layer(
        "self.l$i, self.o$i = nn.Linear(8, 24), nn.Linear(8, 8)",
        "q, k, v = self.l$i(h).view(1, -1, 6, 4).transpose(1, 2).chunk(3, 1)\n"
        "h = h + self.o$i(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, 8))",
        once="l$i",
    ),
    "recurrent": Layer(
        "self.l$i, self.state$i = nn.GRUCell(8, 8), torch.zeros(1, 8)",
        "h = self.l$i(h, self.state$i.expand(h.shape[0], 8))\nself.state$i = h.detach().mean(0, keepdim=True)",
        kept="state$i",
    ),
    "shared": Layer(_LINEAR, "h = self.l$i(torch.tanh(self.l$i(h)))", repeats=True),
    "storage_tied": Layer(
        "self.l$i, self.o$i = nn.Linear(8, 8), nn.Linear(8, 8)\nself.o$i.weight.data = self.l$i.weight.data",
        "h = self.o$i(torch.tanh(self.l$i(h)))",
        repeats=True,
        weight=1,
    ),
    "view_buffer": Layer(
        'self.l$i = nn.Linear(8, 8)\nself.register_buffer("t$i", self.l$i.weight.data.t(), persistent=False)',
        "h = torch.tanh(self.l$i(h)) + 0.1 * h @ self.t$i",
        repeats=True,
        weight=1,
    ),
    "frozen": Layer("self.l$i = nn.Linear(8, 8).requires_grad_(False)", "h = torch.tanh(self.l$i(h))"),
    "running_mean": Layer(
        'self.register_buffer("mean$i", torch.zeros(8))',
        "if self.training:\n    self.mean$i.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)\nh = h - self.mean$i",
    ),
    "counter": Layer(
        'self.register_buffer("count$i", torch.zeros(()))', "self.count$i += 1\nh = h * (1 + 0.01 * self.count$i)"
    ),
    "scale": Layer("self.scale$i = 1.5", "h = h * self.scale$i", setting="scale$i = 0.75"),
    "weight_norm": Layer(
        "self.l$i = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))", "h = self.l$i(h)", repeats=True, weight=1
    ),
    "spectral_norm": Layer(
        "self.l$i = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))", "h = self.l$i(h)", repeats=True, weight=1
    ),
    "symmetric": Layer(
        'self.l$i = nn.Linear(8, 8)\nnn.utils.parametrize.register_parametrization(self.l$i, "weight", Symmetric())',
        "h = self.l$i(h)",
        _SYMMETRIC,
        repeats=True,
        weight=1,
    ),
    "through": Layer(forward="h = Through.apply(h)", helper=_THROUGH),
    "watch": Layer('self.register_buffer("largest$i", torch.ones(()))', "h = Watch.apply(h, self.largest$i)", _WATCH),
    "fused": Layer(
        "self.w$i = nn.Parameter(torch.randn(8, 8) * 0.3)\nself.w$i.main_grad = torch.zeros(8, 8)",
        "h = Fused.apply(h, self.w$i)",
        _FUSED,
        kept="w$i.main_grad",
        weight=1,
    ),
    "count": Layer(
        forward="self.seen$i = h.detach().clone()\nh = Count.apply(h, self.seen$i)", helper=_COUNT, kept="seen$i", weight=1
    ),
    "hooked": Layer(forward="h = h * 1.5\nif h.requires_grad:\n    h.register_hook(lambda gradient: gradient * 0.5)"),
    "noted": Layer("self.n$i = Noted()", "h = self.n$i(h)", _NOTED),
    "in_place": Layer(forward="h = h * 1.0\nh[:, ::2] *= 2\nh = h.relu_()"),
    "kept_detached": Layer(forward="self.kept$i = h.detach()", kept="kept$i", weight=1),
    "kept": Layer(forward="self.kept$i = h = h * 1.25", weight=2),
    "complex": Layer(forward="h = h + 0.1 * (torch.complex(h, h.flip(1)) * 1j).exp().real", weight=1),
    "compiled_inside": Layer(
        'self.l$i = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")', "h = self.l$i(h)", weight=1
    ),
    "linear_no_grad": Layer(_LINEAR, "with torch.no_grad():\n    shift = self.l$i(h).mean()\nh = h - shift", weight=1),
    "checkpointed": Layer(
        "self.l$i = nn.Sequential(nn.Linear(8, 8), nn.Tanh())",
        "h = checkpoint(self.l$i, h, use_reentrant=False)",
        once="l$i[0]",
        weight=1,
    ),
}


# How ``forward`` ends, and what a loop makes its loss of; ``hidden``: whether it has a hidden state outside.
@dataclass(frozen=True, slots=True)
class Form:
    """What forward returns. ``unpack``: how a loop gets ``out`` and ``hidden`` of ``result``; ``loss``: of these; ``terms``:
    what loops may add to the loss."""

    returned: str
    unpack: str
    loss: str
    terms: tuple[str, ...] = ()
    hidden: bool = False
    weight: int = 2


_OWN = "result['loss']"
FORMS: dict[str, Form] = {
    "out": Form("out", "out = result", "", weight=5),
    "loss": Form("$loss", "out = result", "result", weight=3),
    "pair": Form("out, h", "out, hidden = result", "", ("0.1 * hidden.abs().mean()",), True, weight=4),
    "dict": Form(
        "{'loss': $loss, 'out': out, 'hidden': h}",
        "out, hidden = result['out'], result['hidden']",
        _OWN,
        ("0.1 * hidden.abs().mean()", "0.1 * out.abs().sum()"),
        True,
        weight=3,
    ),
    "view": Form("{'loss': $loss, 'flat': out.view(-1)}", "out = result['flat']", _OWN, ("0.1 * out.abs().sum()",), weight=1),
    "detached": Form("{'loss': $loss, 'first': out.detach()}", "out = result['first']", _OWN, ("out.mean()",), weight=1),
    "weight": Form(
        "{'loss': $loss, 'weight': self.head.weight}", "out = result['weight']", _OWN, ("0.01 * out.abs().sum()",), weight=1
    ),
    "several": Form(
        "{'loss': $loss, 'hidden': h, 'row': h[0], 'wide': h.sum(0).expand(3, 8)}",
        "out = result['row']",
        _OWN,
        ("0.1 * out.sum() + result['wide'].pow(2).mean()", "0.1 * result['hidden'].sum()"),
        weight=1,
    ),
    "chunks": Form(
        "{'loss': $loss, 'chunks': out.chunk(2, 1), 'target': h.detach()[:, :4]}",
        "out = result['chunks'][1]",
        _OWN,
        ("0.1 * out.sum()", "result['target'].sum() * loss"),
        weight=1,
    ),
    "row": Form("{'loss': $loss, 'row': out[0]}", "out = result['row']", _OWN, ("0.1 * out.sum()",), weight=1),
}
