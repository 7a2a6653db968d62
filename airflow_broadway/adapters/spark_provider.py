"""The Spark provider's classes, imported without Kubernetes' client.

The provider imports that client, 2,000 modules, wherever its provider is installed, and each task
of a Dag with a Spark operator would take a second for it.  It is loaded when the provider first
uses it: for an application on Kubernetes.
"""

from __future__ import annotations

import sys
from importlib.util import LazyLoader, find_spec, module_from_spec

_KUBE_CLIENT = "airflow.providers.cncf.kubernetes.kube_client"


def import_lazily(name: str) -> None:
    """Imports a module when its first attribute is used; does nothing without its package."""
    if name in sys.modules:
        return
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return
    if spec is None or spec.loader is None:
        return
    # As in the documentation of importlib.
    spec.loader = LazyLoader(spec.loader)
    module = module_from_spec(spec)
    sys.modules[name] = module
    # Otherwise `from package import module` uses an attribute of the module.
    package, _, attribute = name.rpartition(".")
    setattr(sys.modules[package], attribute, module)
    spec.loader.exec_module(module)


import_lazily(_KUBE_CLIENT)

from airflow.providers.apache.spark.hooks.spark_connect import SparkConnectHook  # noqa: E402
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook  # noqa: E402
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator  # noqa: E402

__all__ = ["SparkConnectHook", "SparkSubmitHook", "SparkSubmitOperator"]
