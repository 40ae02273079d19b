"""Which base model an engine serves: an adapter means nothing, and is not refused, on another one of its shapes."""

from pathlib import Path


def is_same_base(root: str | None, base_model: str) -> bool:
    """Whether the base that an engine was started with is a policy's.

    Args:
        root: as the engine says it: a directory, or a hub name, which only its name can tell from others. None: the
            engine has not said anything yet, and is given the benefit of the doubt.
        base_model: the policy's directory.
    """
    if root is None or root == base_model:
        return True
    directory = Path(base_model)
    if Path(root).is_absolute():
        return Path(root).resolve() == directory.resolve()
    fetched = root.replace("/", "--")
    return directory.name in (fetched, Path(root).name) or f"models--{fetched}" in directory.parts
