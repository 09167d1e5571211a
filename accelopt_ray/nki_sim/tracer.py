"""Traces a kernel: source text and input shapes in, a loop-nest program out.

The kernel's ``for`` statements are rewritten so that ranges are traced once with symbolic indices. When the kernel
needs the value of a loop index, the whole trace is repeated with that loop unrolled, until none is left to unroll.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Union

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.nki_sim import builder as tracing
from accelopt_ray.nki_sim import dtypes, errors, loops, modules
from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.loop_variables import ConcreteLoopsNeeded, Site, requested_sites
from accelopt_ray.nki_sim.program import Program, Role, Space
from accelopt_ray.nki_sim.spaces import SBUF_USABLE_BYTES
from accelopt_ray.nki_sim.tile import Tensor, whole
from accelopt_ray.nki_sim.trace_records import TracedBuffer
from accelopt_ray.nki_sim.validate import validate

KernelInput = Union[TensorSpec, float, int]

_HELPERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "loop": ("__nki_loop__", loops.iterate),
    "branch": ("__nki_branch__", loops.branch),
    "while": ("__nki_while__", loops.while_condition),
    "annotated": ("__nki_annotated__", loops.annotated),
}
_LOCK = threading.RLock()
_MODULE_NAME = "nki_kernel_file"


def trace_kernel(source: str, inputs: Sequence[KernelInput], entry: str = "kernel", target: str = "trn1") -> Program:
    """Traces a kernel for given input shapes.

    The source is executed in this process: call it where that is acceptable.

    Args:
        source: Text of the kernel file.
        inputs: The kernel's positional arguments: tensors by shape and dtype, scalars as they are.
        entry: Name of the kernel function; ``optimized_kernel`` is tried as well when it is ``kernel``.
        target: ``trn1``, ``trn2`` or ``trn3``.

    Returns:
        The program.

    Raises:
        KernelError: For any fault of the kernel.
        ValueError: For an unknown target.
    """
    if target not in SBUF_USABLE_BYTES:
        raise ValueError(f"unknown target {target!r}; expected one of {', '.join(SBUF_USABLE_BYTES)}")
    code, names = _compile(source)
    concrete: frozenset[Site] = frozenset()
    with _LOCK, modules.installed():
        while True:
            builder = tracing.Builder(target, concrete, names)
            requested_sites.clear()
            try:
                program = _trace_once(code, inputs, entry, builder)
                needed = builder.pending | requested_sites
            except ConcreteLoopsNeeded as request:
                needed = set(request.sites)
            if not needed:
                validate(program)
                return program
            if needed <= concrete:
                raise errors.unsupported("a loop index used after its loop as a number")
            concrete |= needed


def _compile(source: str) -> tuple[Any, dict[int, str]]:
    """Compiles the source with its loops rewritten; also maps lines to the names assigned there."""
    try:
        tree = ast.parse(source, tracing.KERNEL_FILENAME)
        names = _assigned_names(tree)
        rewritten = ast.fix_missing_locations(_Rewriter().visit(tree))
        return compile(rewritten, tracing.KERNEL_FILENAME, "exec"), names
    except SyntaxError as error:
        raise errors.compile_error(f"SyntaxError: {error.msg}", line=error.lineno or 0) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise errors.compile_error(f"{type(error).__name__}: {error}") from None


class _Rewriter(ast.NodeTransformer):
    """Puts the tracer's helpers where Python would act on its own.

    These are loops, branches on a loop index, ``while`` tests and shape annotations.
    """

    def __init__(self) -> None:
        self._loop_names: list[str] = []

    def visit_For(self, node: ast.For) -> ast.For:
        is_loop = isinstance(node.target, ast.Name) and _iterates_a_range(node.iter)
        if is_loop:
            assert isinstance(node.target, ast.Name)
            self._loop_names.append(node.target.id)
        self.generic_visit(node)
        if is_loop:
            self._loop_names.pop()
        name = node.target.id if isinstance(node.target, ast.Name) else "i"
        node.iter = _call_helper(
            "loop", node.iter, ast.Constant(name), ast.Constant(node.lineno), ast.Constant(node.col_offset)
        )
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        self.generic_visit(node)
        used = {child.id for child in ast.walk(node.test) if isinstance(child, ast.Name)}
        if used & set(self._loop_names):
            node.body = _in_branch(node.body)
            node.orelse = _in_branch(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        self.generic_visit(node)
        node.test = _call_helper("while", node.test)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        self.generic_visit(node)
        if node.value is not None and isinstance(node.target, ast.Name) and _names_a_tensor(node.annotation):
            node.value = _call_helper("annotated", ast.Constant(node.target.id), node.value, node.annotation)
        return node


def _iterates_a_range(iterable: ast.expr) -> bool:
    if not isinstance(iterable, ast.Call):
        return False
    name = getattr(iterable.func, "attr", getattr(iterable.func, "id", ""))
    return name in ("range", "affine_range", "sequential_range")


def _in_branch(body: list[ast.stmt]) -> list[ast.stmt]:
    if not body:
        return body
    call = ast.Call(func=ast.Name(_HELPERS["branch"][0], ast.Load()), args=[], keywords=[])
    enclosing = ast.With(items=[ast.withitem(context_expr=call)], body=body)
    return [ast.copy_location(enclosing, body[0])]


def _call_helper(name: str, *arguments: ast.expr) -> ast.Call:
    located = next(argument for argument in arguments if hasattr(argument, "lineno"))
    call = ast.Call(func=ast.Name(_HELPERS[name][0], ast.Load()), args=list(arguments), keywords=[])
    return ast.copy_location(call, located)


def _names_a_tensor(annotation: ast.expr) -> bool:
    if not isinstance(annotation, ast.Subscript):
        return False
    base = annotation.value
    return getattr(base, "attr", getattr(base, "id", "")) in ("tensor", "mutable_tensor")


def _assigned_names(tree: ast.AST) -> dict[int, str]:
    names: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        else:
            continue
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            names[line] = name
    return names


def _trace_once(code: Any, inputs: Sequence[KernelInput], entry: str, builder: tracing.Builder) -> Program:
    module = ModuleType(_MODULE_NAME)
    namespace = vars(module)
    namespace.update({"__file__": tracing.KERNEL_FILENAME, "__builtins__": builtins, **dict(_HELPERS.values())})
    sys.modules[_MODULE_NAME] = module  # where dataclasses and the like look for a class's globals
    try:
        exec(code, namespace)
        kernel = _find_entry(namespace, entry)
        tracing.activate(builder)
        try:
            return _call(kernel, inputs, builder)
        finally:
            tracing.deactivate(builder)
    except KernelError as error:
        if not error.line:
            error.line = _kernel_line(error)
        raise
    except ConcreteLoopsNeeded:
        raise
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        message = "".join(traceback.format_exception_only(type(error), error)).strip()
        raise errors.compile_error(message, line=_kernel_line(error)) from error
    finally:
        sys.modules.pop(_MODULE_NAME, None)


def _find_entry(namespace: dict[str, Any], entry: str) -> Any:
    kernel = namespace.get(entry)
    if kernel is None and entry == "kernel":
        kernel = namespace.get("optimized_kernel")
    if kernel is None or not callable(kernel):
        raise errors.compile_error(f"the kernel file defines no function '{entry}'")
    return kernel


def _kernel_line(error: BaseException) -> int:
    line = 0
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == tracing.KERNEL_FILENAME:
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def _call(kernel: Any, inputs: Sequence[KernelInput], builder: tracing.Builder) -> Program:
    function: Callable[..., Any] = kernel.function if isinstance(kernel, modules.KernelFunction) else kernel
    parameters = _parameters(function)
    arguments: list[Any] = []
    buffers: list[TracedBuffer] = []
    for position, value in enumerate(inputs):
        if not isinstance(value, TensorSpec):
            arguments.append(value)
            continue
        name, annotation = parameters[position] if position < len(parameters) else (f"arg{position}", "")
        dtype = dtypes.canonical(value.dtype)
        if dtype is None:
            raise errors.dtype_not_supported(value.dtype, name, dtypes.NAMES)
        buffer = builder.new_buffer(Space.HBM, tuple(int(s) for s in value.shape), dtype, role=Role.INPUT, name=name)
        buffer.name = name
        buffer.mutable = "mutable_tensor" in annotation
        buffers.append(buffer)
        arguments.append(whole(buffer))
    result = kernel(*arguments)
    return builder.finish(buffers, _outputs(result, buffers))


def _parameters(function: Callable[..., Any]) -> list[tuple[str, str]]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    found: list[tuple[str, str]] = []
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else repr(annotation)
        found.append((parameter.name, text))
    return found


def _outputs(result: Any, inputs: Sequence[TracedBuffer]) -> list[Tensor]:
    """Checks what the kernel returned."""
    returned = list(result) if isinstance(result, (tuple, list)) else [result]
    outputs: list[Tensor] = []
    for value in returned:
        if not isinstance(value, Tensor):
            kind = "nothing" if value is None else f"a value of type '{type(value).__name__}'"
            raise errors.compile_error(
                f"the kernel returns {kind}; at least one output tensor in shared_hbm must be returned",
                "tensor_output_not_written_to",
            )
        buffer = value.buffer
        if buffer.space is not Space.HBM:
            raise errors.unsupported_memory("return value", "kernel", "shared_hbm", buffer.space.value)
        if buffer.role is Role.INPUT and not buffer.mutable:
            raise errors.compile_error(
                f"the kernel returns its parameter `{buffer.name}`, which is immutable; return a tensor in shared_hbm"
            )
        if buffer.role is Role.CONSTANT:
            raise errors.compile_error(
                f"the kernel returns the constant `{buffer.name}`; return a tensor in shared_hbm"
            )
        if not buffer.written and buffer.role is not Role.INPUT:
            raise errors.output_not_written(buffer.name)
        if value.size != value.buffer_size():
            raise errors.compile_error(f"the kernel returns a part of tensor `{buffer.name}`; return the whole tensor")
        outputs.append(value)
    returned_ids = {tensor.buffer.id for tensor in outputs}
    if len(returned_ids) != len(outputs):
        raise errors.compile_error("the kernel returns the same tensor twice")
    missing = [b.name for b in inputs if b.mutable and b.written and b.id not in returned_ids]
    if missing:
        raise errors.mutable_not_returned(missing)
    return outputs
