"""Names of families, the family of a site, and the features that networks read of data."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from pyro.distributions import NanMaskedMultivariateNormal, NanMaskedNormal, constraints
from torch import Tensor
from torch.distributions import Distribution

from pyro_nami.factors.bijections import has_tensor_bounds, support_of
from pyro_nami.factors.completed import constraints_of_parameters, is_support_unknown
from pyro_nami.factors.family import Family
from pyro_nami.factors.layout import Layout, ObservedLayout
from pyro_nami.factors.own_type import OwnTypeFamily
from pyro_nami.factors.types import num_classes, type_of
from pyro_nami.factors.unconstrained import BUILT_IN, NormalFamily, SinhArcsinhFamily
from pyro_nami.factors.wrappers import innermost
from pyro_nami.messages import warn

__all__ = ["FamilyFactory", "FamilySpec", "features_of", "make_family", "register_family"]

FamilyFactory = Callable[[str, Distribution, Tensor], Family]
FamilySpec = str | FamilyFactory | None


def make_family(spec: FamilySpec, name: str, prior: Distribution, value: Tensor) -> Family:
    """Returns the family of one latent site.

    Args:
        spec: None for the default (the model's own type for discrete sites; for continuous ones Normal, but
            sinh-arcsinh for a single bounded number outside of plates); a name (``"normal"``, ``"sinh_arcsinh"``,
            ``"mixture"``, ``"flow"``, ``"match"``, or registered), or a `Family` subclass or callable as for that.
        name, prior, value: as for `Family`.

    Raises:
        NotImplementedError: the site's support or type is not covered.
        ValueError: so on a sphere, as Pyro's guides raise it; an unknown name; a family that does not fit the site, or
            whose methods return other shapes than `Family` asks for.
        TypeError: `spec` is none of the kinds above, or did not give a `Family`.

    Example:
        >>> scale = torch.distributions.HalfNormal(torch.tensor(1.0))
        >>> [type(make_family(spec, "z", scale, torch.tensor(1.0))).__name__ for spec in (None, "normal", "match")]
        ['SinhArcsinhFamily', 'NormalFamily', 'OwnTypeFamily']
    """
    if is_support_unknown(prior):
        warn(
            f"The support of '{name}' is taken to be real, as {type(innermost(prior)).__name__} defines none. Define "
            "its property `support` if values have bounds."
        )
    factory = _default if spec is None else _look_up(spec, name)
    try:
        family = factory(name, prior, value)
    except NotImplementedError as error:
        raise _unsupported(spec, name, prior) from error
    if not isinstance(family, Family):
        raise TypeError(
            f'Expected the family of site "{name}" to be a Family; got {type(family).__name__}'
        )
    if not type(family).__module__.startswith(__name__.partition(".")[0] + "."):
        _check_own(family, name, prior, value)
    return family


def _check_own(family: Family, name: str, prior: Distribution, value: Tensor) -> None:
    """Checks that a family of the user's own has the shapes that `Family` asks for."""
    anchor = family.anchor(prior)
    params = family.initial(value, 1.0, anchor)
    shape = (family.num_elements, family.num_params)
    kind = type(family).__name__
    if not isinstance(params, Tensor) or params.shape[-2:] != shape:
        got = tuple(params.shape) if isinstance(params, Tensor) else type(params).__name__
        raise ValueError(
            f'Expected `{kind}.initial` at site "{name}" to return parameters (*batch, elements, num_params), which '
            f"end in {shape}; got {got}."
        )
    try:
        made = family.elements(params, anchor).batch_shape
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f'Expected `{kind}.elements` at site "{name}" to take parameters {tuple(params.shape)}, of num_params = '
            f"{family.num_params}; it raises {type(error).__name__}: {error}"
        ) from error
    if made[-1:] != shape[:1]:
        raise ValueError(
            f'Expected `{kind}.elements` at site "{name}" to return a distribution with a batch shape that ends in '
            f"({shape[0]},), the number of elements; got {tuple(made)}."
        )


def register_family(name: str, factory: FamilyFactory) -> None:
    """Registers a family under a name that ``families=`` takes.

    Args:
        name: of the family; an earlier registration is replaced.
        factory: a `Family` subclass, or a callable of a site's name, prior and value that returns a `Family`.

    Raises:
        ValueError: the name is that of a built-in family.
        TypeError: the factory cannot be called.
    """
    if name in _BUILT_IN:
        raise ValueError(
            f"Expected a name other than the built-in {sorted(_BUILT_IN)}; got {name!r}"
        )
    if not callable(factory):
        raise TypeError(
            f"Expected a callable of name, prior and value; got {type(factory).__name__}"
        )
    _registered[name] = factory


def features_of(name: str, prior: Distribution, value: Tensor) -> Layout:
    """Returns the layout of an observed site, which says what is read of its values.

    Bounds that are tensors may depend on latents (``Uniform(0, hi)`` as a likelihood), so they are not used: such a
    site, and one whose support has no bijection, is read as it is.

    Args:
        name: of the site, for messages.
        prior: the distribution at the site in the prototype run.
        value: observed there, ``(*batch, *event)``.
    """
    event_shape = torch.Size(prior.event_shape)
    support = support_of(prior)
    leaf = innermost(prior)
    if value.shape[value.dim() - len(event_shape) :] != event_shape:
        raise ValueError(
            f'Expected the value of site "{name}" to end in its event shape {tuple(event_shape)}; '
            f"got {tuple(value.shape)}"
        )
    dtype = value.dtype if value.is_floating_point() else _parameter_dtype(leaf)
    if support.is_discrete:
        return Layout(support, event_shape, num_classes=num_classes(leaf), dtype=dtype)
    marks_nan = isinstance(leaf, (NanMaskedNormal, NanMaskedMultivariateNormal))
    try:
        support = constraints.real if has_tensor_bounds(support) else support
        return ObservedLayout(support, event_shape, dtype=dtype, marks_nan=marks_nan)
    except NotImplementedError:
        return ObservedLayout(constraints.real, event_shape, dtype=dtype, marks_nan=False)


def _look_up(spec: FamilySpec, name: str) -> FamilyFactory:
    if isinstance(spec, str):
        known = {**_BUILT_IN, **_registered}
        if spec not in known:
            raise ValueError(
                f'Expected one of the families {sorted(known)} at site "{name}"; got {spec!r}. '
                "Others can be added with register_family."
            )
        return known[spec]
    if not callable(spec):
        raise TypeError(
            f'Expected a family name, a Family subclass or a callable at site "{name}"; got {type(spec).__name__}'
        )
    return spec


def _default(name: str, prior: Distribution, value: Tensor, *, match: bool = False) -> Family:
    """Returns the default family; with ``match``, that of the model's own type where `types` has its links."""
    row, support = type_of(prior), support_of(prior)
    discrete = support.is_discrete or row.is_hard
    if row.links and (discrete or match):
        return OwnTypeFamily(name, prior, value)
    if discrete:
        raise NotImplementedError
    alone = prior.batch_shape == prior.event_shape == ()
    skewed = alone and support is not constraints.real and not match
    return (SinhArcsinhFamily if skewed else NormalFamily)(name, prior, value)


def _unsupported(spec: FamilySpec, name: str, prior: Distribution) -> Exception:
    """Returns the error for a site, of the kind that Pyro's own guides raise."""
    kind = type(innermost(prior)).__name__
    if spec is not None and support_of(prior).is_discrete:
        return ValueError(
            f'Expected a family for discrete values at site "{name}" ({kind}); got {spec!r}. Leave the site out of '
            "families= to keep the model's own type, or add a family with register_family."
        )
    sphere = prior.support is constraints.sphere
    hint = f" Use poutine.reparam(model, {{'{name}': ProjectedNormalReparam()}})." if sphere else ""
    return (ValueError if sphere else NotImplementedError)(
        f'Expected at site "{name}" a type or support that a family covers; got {kind} on {prior.support!r}. Give the '
        "site a family in families=, or add one with pyro_nami.register_family(family_name, factory)."
        + hint
    )


def _parameter_dtype(prior: Distribution) -> torch.dtype:
    """Returns the dtype of the parameters of a discrete distribution, else the default one."""
    for parameter in constraints_of_parameters(prior):
        candidate = prior.__dict__.get(parameter)
        if isinstance(candidate, Tensor) and candidate.is_floating_point():
            return candidate.dtype
    return torch.get_default_dtype()


_BUILT_IN: dict[str, FamilyFactory] = {**BUILT_IN, "match": functools.partial(_default, match=True)}
_registered: dict[str, FamilyFactory] = {}
