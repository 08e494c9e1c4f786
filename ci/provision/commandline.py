"""A container as the command that a person would type: what `--dry-run` prints.

The engine is asked through its interface; this says the same in the words of `docker run`, from the same orders, so
that a site can compare it with the documentation of its devices.
"""

from __future__ import annotations

from ci.provision.container import Orders, plain_user


def docker_run(orders: Orders) -> tuple[str, ...]:
    """The `docker run` that starts what `RunningContainer` starts, but for its name and labels."""
    given, (uid, gid) = orders.handover, plain_user()
    words = ["docker", "run", "--rm", "--init", "--network", "none", "--read-only", "--tmpfs", "/tmp"]
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{uid}:{gid}"]
    words += ["--shm-size", orders.needs.shm_size, "--ipc", orders.needs.ipc]
    for limit, most in orders.needs.ulimits.items():
        words += ["--ulimit", f"{limit}={most}"]
    if given.runtime is not None:
        words += ["--runtime", given.runtime]
    if given.gpus:
        # Docker reads the value as a line of CSV: several devices need the quotes.
        words += ["--gpus", f'"device={",".join(given.gpus)}"']
    for device in (*given.cdi, *given.files):
        words += ["--device", device]
    for group in given.groups:
        words += ["--group-add", str(group)]
    for name, value in orders.whole_environment.items():
        words += ["--env", f"{name}={value}"]
    for place in given.mounts:
        words += ["--mount", f"type=bind,source={place},target={place},readonly"]
    for path, inside in orders.shown:
        words += ["--mount", f"type=bind,source={path},target={inside},readonly"]
    words += ["--mount", f"type=bind,source={orders.written[0]},target={orders.written[1]}"]
    words += ["--mount", f"type=volume,source={orders.volume[0]},target={orders.volume[1]}"]
    return (*words, orders.image, *orders.command)
