"""The Spark provider's classes, imported without Kubernetes' client.

The provider imports that client, 2,000 modules, wherever its provider is installed, and each task
of a Dag with a Spark operator would take a second for it.  It is loaded when the provider first
uses it: for an application on Kubernetes.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import LazyLoader, find_spec, module_from_spec
from typing import Any

_PACKAGE = "airflow.providers.cncf.kubernetes"

with suppress(ImportError):  # without that provider
    _package, _spec = import_module(_PACKAGE), find_spec(f"{_PACKAGE}.kube_client")
    if _spec is not None and _spec.loader is not None and _spec.name not in sys.modules:
        _spec.loader = LazyLoader(_spec.loader)
        # The package gets the attribute, too: an import would use one of the module.
        _module: Any = module_from_spec(_spec)
        sys.modules[_spec.name] = _package.kube_client = _module  # type: ignore[attr-defined]
        _spec.loader.exec_module(_module)

from airflow.providers.apache.spark.hooks.spark_connect import SparkConnectHook  # noqa: E402
from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook  # noqa: E402
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator  # noqa: E402

__all__ = ["SparkConnectHook", "SparkSubmitHook", "SparkSubmitOperator"]
