"""Gives modules, parameters and buffers their canonical names."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from tensortrace.tracer.hooks.walk import is_plain, printable
from tensortrace.tracer.placements import fsdp, own_class, stand_ins, wrapper_of
from tensortrace.tracer.placements.pipelining import Stage
from tensortrace.tracer.types import ROOT, STAGE

ALWAYS_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
HOLD_MODULE = frozenset({"DataParallel", "DistributedDataParallel", "DeepSpeedEngine", "Float16Module"})
"""Classes whose child ``module`` is what they wrap; in any other class it is an ordinary name."""


@dataclass(frozen=True, slots=True)
class ModuleName:
    """A module's canonical name. ``wraps``: a module inside it has the same name and is the one recorded.

    ``compiled``: it stands for the compiled module inside it, which cannot be seen. ``entered`` and
    ``left`` are the names of what it is given and returns, where those aren't ``name``.
    """

    name: str
    wraps: bool = False
    compiled: bool = False
    entered: str = ""
    left: str = ""


@dataclass(frozen=True, slots=True)
class TensorName:
    """A parameter's or buffer's canonical name: the first of its FQNs, with the others as aliases."""

    name: str
    aliases: tuple[str, ...] = ()


class _Root:
    """A tree of modules and the prefix of its names; holds the module weakly.

    ``stage`` is what its own calls are called where it is a pipeline's stage. A ``guide`` only gives names
    to what it shares with the stages.
    """

    def __init__(
        self, module: nn.Module, prefix: str, *, stage: ModuleName | None = None, guide: bool = False
    ) -> None:
        self.module = weakref.ref(module)
        self.prefix = prefix
        self.stage = stage
        self.guide = guide


class Names:
    """The names of everything that lives in the roots seen so far; holds no module and no tensor."""

    def __init__(self) -> None:
        self._roots: list[_Root] = []
        self._modules: dict[int, tuple[weakref.ref[nn.Module], ModuleName]] = {}
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], TensorName]] = {}
        self._unowned: dict[int, tuple[weakref.ref[torch.Tensor], TensorName]] = {}
        self._stands_for: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}
        self._pieces: dict[int, tuple[weakref.ref[torch.Tensor], list[str]]] = {}
        self._unowned_count = 0
        self._standalone: set[type[nn.Module]] = set()

    def module(self, module: nn.Module) -> ModuleName:
        """Return a module's name; an unknown module makes its root known, or is a root itself."""
        name = self._known_module(module)
        if name is None:
            self.refresh()
            name = self._known_module(module)
        if name is None:
            self._add_root(self._container(module))
            name = self._known_module(module)
        assert name is not None
        return name

    def is_named(self, module: nn.Module) -> bool:
        """Tell, as fast as can be, whether the module most likely has a name: another may have had its id."""
        return id(module) in self._modules

    def tensor(self, tensor: torch.Tensor) -> TensorName:
        """Return a parameter's or buffer's name, ``param.N`` where no known module owns it."""
        name = self.known(tensor)
        if name is None:
            self.refresh()
            name = self.known(tensor)
        return name or self._name_unowned(tensor)

    def known(self, tensor: torch.Tensor) -> TensorName | None:
        """Return the name of a parameter or buffer seen before, without looking for new ones."""
        for names in (self._tensors, self._unowned):
            found = names.get(id(tensor))
            if found is not None and found[0]() is tensor:
                return found[1]
        return None

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the parameter that a tensor stands in for, or the tensor itself."""
        whole, parameter = self._stands_for.get(id(tensor), (None, None))
        if whole is None or parameter is None or whole() is not tensor:
            return tensor
        found = parameter()
        return tensor if found is None else found

    def pieces(self, tensor: torch.Tensor) -> list[str]:
        """Return the names of the parameters that a flat parameter is made of, none for any other."""
        found = self._pieces.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else []

    def by_id(self, identity: int) -> TensorName | None:
        """Return the name of the living tensor with this ``id``."""
        found = self._tensors.get(identity) or self._unowned.get(identity)
        return found[1] if found is not None and found[0]() is not None else None

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the roots known that own these parameters, although none of them has been called yet."""
        missing = {id(tensor) for tensor in tensors if self.known(tensor) is None}
        if not missing:
            return
        for module in _live_modules():
            if self._known_module(module) is None and missing.intersection(map(id, _own_tensors(module))):
                self._add_root(_biggest_container(module))

    def parameters(self) -> Iterator[tuple[nn.Parameter, TensorName]]:
        """Yield each parameter of the known roots once, in their order."""
        for parameter, name in self._each(lambda root: root.parameters()):
            if isinstance(parameter, nn.Parameter):  # FSDP1 puts views in the place of some
                yield parameter, name

    def buffers(self) -> Iterator[tuple[torch.Tensor, TensorName]]:
        """Yield each buffer of the known roots once, in their order."""
        yield from self._each(lambda root: root.buffers())

    def add_stage(self, stage: Stage) -> None:
        """Make a pipeline stage's module a root: what is in it has the names that the module tree gives.

        The stage itself is ``(stage N)``, but ``(root)`` for what the first is given and the last returns.
        Of two stages on a rank that hold different tensors under one name, the later has a prefix.
        """
        if self.is_stage(stage.module):
            return
        called = ModuleName(
            own := f"{STAGE}{stage.number})",
            entered=ROOT if stage.is_first else own,
            left=ROOT if stage.is_last else own,
        )
        stages = [root for root in self._roots if root.stage is not None]
        guide = _model_around(stage.module)
        prefix = own if guide is None and self._taken_by(stages, stage.module) else ""
        added = [_Root(stage.module, prefix, stage=called)]
        if guide is not None:
            added.insert(0, _Root(guide, "", guide=True))
        self._roots = [*stages, *added, *(root for root in self._roots if root not in stages)]
        self.refresh()

    def elsewhere(self) -> set[int]:
        """Return the ``id`` of each parameter of the models that stages were taken from, if in no stage here.

        An optimizer may have been given them all the same; their values here are never brought up to date.
        """
        guides = [module for root in self._roots if root.guide and (module := root.module()) is not None]
        stages = [module for root in self._roots if root.stage and (module := root.module()) is not None]
        inside = {id(parameter) for stage in stages for parameter in stage.parameters()}
        return {id(parameter) for guide in guides for parameter in guide.parameters()} - inside

    def is_stage(self, module: nn.Module) -> bool:
        """Tell whether the module is a pipeline's stage."""
        return any(root.stage is not None and root.module() is module for root in self._roots)

    def owned(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Yield (module, own name, tensor) of each parameter and buffer of the known roots, once each.

        A root that only gives names to a pipeline's stages owns nothing.
        """
        seen: set[int] = set()
        for root in [root.module() for root in self._roots if not root.guide]:
            for module in root.modules() if root is not None else ():
                for own, tensor in _named_tensors(module):
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        yield module, own, tensor

    def stand_ins(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (tensor, parameter) of what forward uses in the place of parameters of the known roots."""
        for root in [root.module() for root in self._roots]:
            if root is not None:
                yield from stand_ins(root)

    def refresh(self) -> None:
        """Look through the known roots again: modules may have been added, replaced or wrapped."""
        self._roots = [root for root in self._roots if root.module() is not None]
        self._modules.clear()
        self._tensors.clear()
        for root in self._roots:
            module = root.module()
            if module is not None:
                self._scan(module, root.prefix)
                self._name_stage(module, root)

    def _known_module(self, module: nn.Module) -> ModuleName | None:
        found = self._modules.get(id(module))
        return found[1] if found is not None and found[0]() is module else None

    def _each(
        self, of: Callable[[nn.Module], Iterator[torch.Tensor]]
    ) -> Iterator[tuple[torch.Tensor, TensorName]]:
        seen: set[int] = set()
        for root in [root.module() for root in self._roots if not root.guide]:
            swaps = _swaps(root) if root is not None else {}
            for found in of(root) if root is not None else ():
                tensor = swaps.get(id(found), found)
                if id(tensor) not in seen and is_plain(tensor):
                    seen.add(id(tensor))
                    yield tensor, self.tensor(tensor)

    def _container(self, module: nn.Module) -> nn.Module:
        """Return the biggest live module around this one.

        Looking for it takes a tenth of a second, which criteria made anew each step must not cost.
        """
        if _is_stateless(module) and type(module) in self._standalone:
            return module
        container = _biggest_container(module)
        if container is module and _is_stateless(module):
            self._standalone.add(type(module))
        return container

    def _name_unowned(self, tensor: torch.Tensor) -> TensorName:
        name = TensorName(f"param.{self._unowned_count}")
        self._unowned_count += 1
        self._unowned[id(tensor)] = (weakref.ref(tensor), name)
        return name

    def _add_root(self, module: nn.Module) -> None:
        """Name a tree: one that contains known roots takes the place of the first, others get a prefix."""
        inside = {id(part) for part in module.modules()}
        covered = [root for root in self._roots if id(root.module()) in inside and root.stage is None]
        prefix = min((root.prefix for root in covered), default=None)
        root = _Root(module, self._prefix_for(module) if prefix is None else prefix)
        self._roots = [root, *self._roots] if root.prefix == "" else [*self._roots, root]
        self._roots = [known for known in self._roots if known not in covered]
        if covered or root.prefix == "":
            self.refresh()
        else:
            self._scan(module, root.prefix)

    def _prefix_for(self, module: nn.Module) -> str:
        """Return "" for the first root that can be trained, else the class name, numbered if taken.

        A root without trainable parameters (a transform, a criterion, a frozen encoder) never takes the
        main root's name, even when it runs first.
        """
        taken = {root.prefix for root in self._roots if root.module() is not None}
        if "" not in taken and any(parameter.requires_grad for parameter in module.parameters()):
            return ""
        name, number = printable(own_class(_unwrapped(module)).__name__), 0
        while (prefix := f"{name}.{number}" if number else name) in taken:
            number += 1
        return prefix

    def _taken_by(self, stages: list[_Root], module: nn.Module) -> bool:
        """Tell whether a stage holds, under a name of this module's, another tensor."""
        own = {
            name: tensor for path, part in _walk(module, "", ()) for name, tensor in _full_names(path, part)
        }
        held = (root.module() for root in stages)
        return any(
            own.get(name, tensor) is not tensor
            for other in held
            if other is not None
            for path, part in _walk(other, "", ())
            for name, tensor in _full_names(path, part)
        )

    def _name_stage(self, module: nn.Module, root: _Root) -> None:
        """Name a stage's root, and what wrappers there are between the two."""
        while root.stage is not None:
            wrapped = _wrapped_attribute(module)
            compiled = _describe("", module).compiled
            name = replace(root.stage, wraps=wrapped is not None and not compiled, compiled=compiled)
            self._modules[id(module)] = (weakref.ref(module), name)
            if wrapped is None:
                return
            module = dict(_children(module))[wrapped]

    def _scan(self, root: nn.Module, prefix: str) -> None:
        """Name what no earlier root has named: modules by their first path, tensors by all of them."""
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        pairs = list(stand_ins(root))
        swaps = {id(whole): parameter for whole, parameter in pairs}
        for path, module in _walk(root, prefix, ()):
            if id(module) not in self._modules:
                self._modules[id(module)] = (weakref.ref(module), _describe(path, module))
            for own, found_there in _named_tensors(module):
                tensor = swaps.get(id(found_there), found_there)
                if fqns := fsdp.piece_names(tensor):
                    self._pieces.setdefault(id(tensor), (weakref.ref(tensor), [_join(path, f) for f in fqns]))
                if id(tensor) not in self._tensors:
                    tensors[id(tensor)] = tensor
                    found = names.setdefault(id(tensor), [])
                    if (full := _join(path, own)) not in found:
                        found.append(full)
        for key, (first, *others) in names.items():
            self._tensors[key] = (weakref.ref(tensors[key]), TensorName(first, tuple(others)))
        for whole, parameter in pairs:
            name = self.known(parameter)
            if name is not None:
                self._tensors[id(whole)] = (weakref.ref(whole), name)
                self._stands_for[id(whole)] = (weakref.ref(whole), weakref.ref(parameter))


def _swaps(root: nn.Module) -> dict[int, torch.Tensor]:
    """Return the parameter for the ``id`` of each tensor that stands in for it at the moment."""
    return {id(whole): parameter for whole, parameter in stand_ins(root)}


def class_of(module: nn.Module) -> str:
    """Return the name of the class of the innermost module that the module wraps."""
    return type(_unwrapped(module)).__name__


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return (canonical FQN in the module, parameter or buffer), each tensor under its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, part in _walk(module, "", ()):
        for name, tensor in _full_names(path, part):
            found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def _describe(path: str, module: nn.Module) -> ModuleName:
    child = _wrapped_attribute(module)
    compiled = child == "_orig_mod" or getattr(module, "_compiled_call_impl", None) is not None
    return ModuleName(path or ROOT, wraps=child is not None and not compiled, compiled=compiled)


def _wrapped_attribute(module: nn.Module) -> str | None:
    """Return the name of the attribute that holds the module this one wraps, or None."""
    children = [name for name, _ in _children(module)]
    for name in children:
        if name in ALWAYS_WRAPPERS:
            return name
    if type(module).__name__ in HOLD_MODULE and "module" in children:
        return "module"
    wrapper = wrapper_of(module)
    return wrapper.child if wrapper is not None and wrapper.child in children else None


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the innermost module that the module wraps, or itself."""
    while (attribute := _wrapped_attribute(module)) is not None:
        module = dict(_children(module))[attribute]
    return module


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, child); a scripted module's children can be listed and not iterated over."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _walk(module: nn.Module, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (canonical path, module) depth first, a shared module once per path to it."""
    yield path, module
    wrapped = _wrapped_attribute(module)
    for name, child in _children(module):
        if id(child) not in above:
            below = path if name == wrapped else _join(path, name)
            yield from _walk(child, below, (*above, id(module)))


def _join(path: str, name: str) -> str:
    name = printable(name)
    return f"{path}.{name}" if path else name


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return [*fsdp.named_tensors(module), *((name, tensor) for name, tensor in both if tensor is not None)]


def _full_names(path: str, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(_join(path, own), tensor) for own, tensor in _named_tensors(module)]


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [tensor for _, tensor in _named_tensors(module)]


def _is_stateless(module: nn.Module) -> bool:
    return not (_children(module) or _named_tensors(module))


def _live_modules() -> list[nn.Module]:
    """Return every module that is alive and initialised; the type is asked, objects may lie about it."""
    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), nn.Module) and "_modules" in found.__dict__
    ]


def _model_around(stage: nn.Module) -> nn.Module | None:
    """Return the live model from which a stage's parts were taken, None where they are the stage's only.

    Plain lists of stages and the halves that torch's tracing makes of a model name nothing.
    """
    stage = _unwrapped(stage)
    found = _biggest_container(stage, *(child for _, child in _children(stage)))
    if _unwrapped(found) is stage or isinstance(found, (fx.GraphModule, nn.ModuleList, nn.ModuleDict)):
        return None
    return None if type(found).__module__.startswith("torch.distributed.pipelining") else found


def _biggest_container(*modules: nn.Module) -> nn.Module:
    """Return the biggest live module that contains one of these, or is one of them."""
    parents: dict[int, list[nn.Module]] = {}
    for parent in _live_modules():
        for _, child in _children(parent):
            parents.setdefault(id(child), []).append(parent)
    above, todo = {id(module): module for module in modules}, [*modules]
    while todo:
        for parent in parents.get(id(todo.pop()), ()):
            if id(parent) not in above:
                above[id(parent)] = parent
                todo.append(parent)
    return max(above.values(), key=lambda found: sum(1 for _ in found.modules()))
