"""Branches on a tensor of which one side only raises: ``if labels.max() >= n: raise ValueError(...)``.

Dynamo cannot branch on what a tensor holds, but it makes an operation of an ``assert``: a check, which raises when the graph
runs. Here it does the same for every branch whose one side does nothing but raise, and goes on with the other side.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import linecache
import operator
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mtcompile.torch_private.known_values import known_value
from mtcompile.torch_private.thread_setting import ThreadSetting

_JUMPS = {  # by opcode's name: which operand jumps
    **dict.fromkeys(("POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE"), operator.not_),
    **dict.fromkeys(("POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE"), operator.truth),
}
_LONGEST = 80  # instructions of a side that only raises
_EFFECTS = (  # of instructions, by how their names begin; what is stored in local variables nobody sees
    *("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME", "STORE_S", "DELETE_", "IMPORT_", "SETUP_", "BEFORE_"),
    *("RETURN_", "YIELD_", "SEND", "GET_", "FOR_", "RERAISE"),
)
_JUMPING = {*dis.hasjrel, *dis.hasjabs}
_TORCH = str(Path(torch.__file__).parent) + os.sep


_checking = ThreadSetting(False)


@contextlib.contextmanager
def checking_branches(enabled: bool) -> Iterator[None]:
    """If ``enabled``, captures inside, in this thread, make checks of branches on a tensor of which one side only raises."""
    _replace_jumps()
    with _checking.during(enabled):
        yield


@functools.cache
def _replace_jumps() -> None:
    """Lets Dynamo's jumps ask here first. Where this version of torch has others than expected, nothing is changed."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    if sys.version_info < (3, 11):  # exceptions that are caught show in another way
        return
    translators: list[Any] = [InstructionTranslatorBase]
    while translators:
        translator = translators.pop()
        translators += translator.__subclasses__()
        for name, jumps in _JUMPS.items():
            plain = getattr(translator, name, None)
            if name in dis.opmap and translator.dispatch_table[dis.opmap[name]] is plain is not None:
                translator.dispatch_table[dis.opmap[name]] = _checked(plain, jumps)


def _checked(plain: Callable[[Any, Any], None], jumps: Callable[[Any], bool]) -> Callable[[Any, Any], None]:
    from torch._dynamo.variables import ConstantVariable

    @functools.wraps(plain)
    def jump(tx: Any, inst: Any) -> None:
        value = _tensor(tx.stack[-1]) if _checking.value and tx.stack else None
        if value is None:
            return plain(tx, inst)
        here, there = tx.instruction_pointer, tx.indexof[inst.target]
        raising = next((side for side in (here, there) if _only_raises(tx, side)), None)
        if raising is None:
            if (known := known_value(tx, _truth(tx, value))) is not None:
                tx.pop()
                tx.push(ConstantVariable.create(bool(known)))
            return plain(tx, inst)
        tx.pop()
        holds = jumps is operator.truth if raising == here else jumps is operator.not_
        _check(tx, value, holds, _message(tx, raising))
        if raising == here:
            tx.jump(inst)
        return None

    return jump


def _tensor(variable: Any) -> Any:
    """``variable`` if it stands for a tensor that has a truth value, else None."""
    from torch._dynamo.variables import LazyVariableTracker, TensorVariable

    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    if type(variable) is not TensorVariable:
        return None
    example = variable.proxy.node.meta.get("example_value")
    return variable if isinstance(example, torch.Tensor) and example.numel() == 1 else None


def _truth(tx: Any, value: Any) -> Any:
    """The truth of a tensor's number, as a tensor: a branch needs no more, and a capture by it serves other numbers, too."""
    from torch._dynamo.variables.builder import wrap_fx_proxy

    if value.proxy.node.meta["example_value"].dtype is torch.bool:
        return value
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", operator.ne, (value.proxy, 0), {}))


def _only_raises(tx: Any, start: int) -> bool:
    """Tells whether the instructions from ``start`` on do nothing but raise an exception that leaves the captured function."""
    for inst in tx.instructions[start : start + _LONGEST]:
        if inst.opname == "RAISE_VARARGS":
            return bool(inst.arg == 1) and not _is_caught(tx, inst)
        if inst.opcode in _JUMPING or inst.opname.startswith(_EFFECTS):
            return False
    return False


def _is_caught(tx: Any, inst: Any) -> bool:
    """Tells whether an exception raised at ``inst`` may be caught, or its way out noticed, by a handler other than a
    ``with`` statement's."""
    while tx is not None:
        while entry := inst.exn_tab_entry:
            handler = tx.indexof[entry.target]
            names = [each.opname for each in tx.instructions[handler : handler + 2]]
            if names[0] == "PUSH_EXC_INFO" and names[1:] != ["WITH_EXCEPT_START"]:
                return True
            inst = entry.target
        tx = getattr(tx, "parent", None)
        inst = None if tx is None else tx.current_instruction
    return False


def _check(tx: Any, value: Any, holds: bool, message: str) -> None:
    """Adds the operation that raises unless ``value`` is as true as ``holds``."""
    operand = value.proxy
    if not holds:
        from torch._dynamo.variables.builder import wrap_fx_proxy

        operand = tx.output.create_proxy("call_function", torch.logical_not, (operand,), {})
        wrap_fx_proxy(tx, operand)
    tx.output.create_proxy("call_function", torch._assert_async, (operand, message), {})


def _message(tx: Any, start: int) -> str:
    """The words of the exception that is raised from ``start`` on, and the user's line that raises it."""
    file, line = tx.f_code.co_filename, tx.lineno
    words = _words(tx, start) or linecache.getline(file, tx.instructions[start].positions.lineno).strip()
    while file.startswith(_TORCH) and (tx := getattr(tx, "parent", None)) is not None:
        file, line = tx.f_code.co_filename, tx.lineno
    name = "" if tx is None else f" in {tx.f_code.co_name}"
    return f"{words}\n  at {file}:{line}{name}: {linecache.getline(file, line).strip()}"


def _words(tx: Any, start: int) -> str:
    """The class and the message of the exception that is raised from ``start`` on; "" where the message depends on values."""
    from torch._dynamo.exc import ObservedException, TorchRuntimeError, Unsupported, UserError

    state = ("instruction_pointer", "current_instruction", "lineno", "kw_names", "stack", "symbolic_locals")
    before = {name: getattr(tx, name) for name in state if hasattr(tx, name)}
    tx.stack, tx.symbolic_locals, index = list(tx.stack), dict(tx.symbolic_locals), start
    try:
        while (inst := tx.instructions[index]).opname != "RAISE_VARARGS":
            index += 1
            tx.current_instruction, tx.instruction_pointer = inst, index
            tx.dispatch_table[inst.opcode](tx, inst)
        exception = tx.stack[-1]
        kind = getattr(exception, "exc_type", None) or exception.as_python_constant()
        args = [str(arg.as_python_constant()) for arg in getattr(exception, "args", ())]
        return ": ".join([kind.__name__, *args])
    except (Unsupported, UserError, ObservedException, TorchRuntimeError, NotImplementedError, AttributeError):
        return ""
    finally:
        for name, value in before.items():
            setattr(tx, name, value)
