"""What KubeRay 1.6, Kubernetes and its gateways know of the fields that we use: what they do not know, they drop."""

from collections.abc import Iterator, Mapping
from typing import Any

BASE = {"": "apiVersion kind metadata spec", ".metadata": "annotations labels name namespace"}
POD = {
    "": "metadata spec",
    ".metadata": "annotations labels",
    ".spec": "containers initContainers nodeSelector securityContext serviceAccountName terminationGracePeriodSeconds"
    " tolerations topologySpreadConstraints volumes",
    ".spec.securityContext": "fsGroup fsGroupChangePolicy runAsGroup runAsNonRoot runAsUser seccompProfile",
    ".spec.securityContext.seccompProfile": "localhostProfile type",
    ".spec.tolerations": "effect key operator tolerationSeconds value",
    ".spec.containers": "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe"
    " resources securityContext startupProbe volumeMounts workingDir",
    ".spec.containers.env": "name value valueFrom",
    ".spec.containers.env.valueFrom": "configMapKeyRef fieldRef resourceFieldRef secretKeyRef",
    ".spec.containers.env.valueFrom.secretKeyRef": "key name optional",
    ".spec.containers.lifecycle": "postStart preStop",
    ".spec.containers.lifecycle.preStop": "exec httpGet sleep tcpSocket",
    ".spec.containers.lifecycle.preStop.exec": "command",
    ".spec.containers.ports": "containerPort hostPort name protocol",
    ".spec.containers.resources": "claims limits requests",
    ".spec.containers.securityContext": "allowPrivilegeEscalation capabilities privileged readOnlyRootFilesystem runAsNonRoot"
    " runAsUser seccompProfile",
    ".spec.containers.securityContext.capabilities": "add drop",
    ".spec.containers.volumeMounts": "mountPath name readOnly subPath",
    ".spec.volumes": "configMap emptyDir hostPath name nfs persistentVolumeClaim secret",
    ".spec.volumes.emptyDir": "medium sizeLimit",
    ".spec.volumes.persistentVolumeClaim": "claimName readOnly",
    ".spec.volumes.secret": "defaultMode items optional secretName",
}
CLUSTER = {
    "": "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec headServiceAnnotations"
    " managedBy rayVersion suspend upgradeStrategy workerGroupSpecs",
    ".authOptions": "mode",
    ".autoscalerOptions": "env envFrom idleTimeoutSeconds image imagePullPolicy resources securityContext upscalingMode version"
    " volumeMounts",
    ".autoscalerOptions.securityContext": POD[".spec.containers.securityContext"],
    ".autoscalerOptions.securityContext.capabilities": POD[".spec.containers.securityContext.capabilities"],
    ".gcsFaultToleranceOptions": "externalStorageNamespace redisAddress redisPassword redisUsername",
    ".gcsFaultToleranceOptions.redisPassword": "value valueFrom",
    ".gcsFaultToleranceOptions.redisPassword.valueFrom": POD[".spec.containers.env.valueFrom"],
    ".gcsFaultToleranceOptions.redisPassword.valueFrom.secretKeyRef": POD[".spec.containers.env.valueFrom.secretKeyRef"],
    ".headGroupSpec": "enableIngress headService labels rayStartParams resources serviceType template",
    ".workerGroupSpecs": "groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts rayStartParams"
    " replicas resources scaleStrategy suspend template",
    **{f".{group}.template{path}": names for group in ("headGroupSpec", "workerGroupSpecs") for path, names in POD.items()},
}
SERVICE = {
    **BASE,
    ".spec": "excludeHeadPodFromServeSvc managedBy rayClusterConfig rayClusterDeletionDelaySeconds serveConfigV2 serveService"
    " suspend upgradeStrategy",
    ".spec.serveService": "metadata spec",
    ".spec.serveService.spec": "clusterIP ports type",
    ".spec.serveService.spec.ports": "appProtocol name nodePort port protocol targetPort",
    ".spec.upgradeStrategy": "clusterUpgradeOptions type",
    ".spec.upgradeStrategy.clusterUpgradeOptions": "gatewayClassName intervalSeconds maxSurgePercent stepSizePercent",
    **{f".spec.rayClusterConfig{path}": names for path, names in CLUSTER.items()},
}
LABELS = "matchExpressions matchLabels"
ROUTE = {
    **BASE,
    ".spec": "hostnames parentRefs rules",
    ".spec.parentRefs": "group kind name namespace port sectionName",
    ".spec.rules": "backendRefs filters matches name timeouts",
    ".spec.rules.timeouts": "backendRequest request",
    ".spec.rules.backendRefs": "group kind name namespace port weight",
    ".spec.rules.matches": "headers method path queryParams",
    ".spec.rules.matches.method": "method service type",
}
KINDS = {
    "RayService": SERVICE,
    "PodMonitor": {
        **BASE,
        ".spec": "jobLabel namespaceSelector podMetricsEndpoints podTargetLabels selector",
        ".spec.selector": LABELS,
        ".spec.podMetricsEndpoints": "interval path port scheme",
    },
    "PodDisruptionBudget": {
        **BASE,
        ".spec": "maxUnavailable minAvailable selector unhealthyPodEvictionPolicy",
        ".spec.selector": LABELS,
    },
    "NetworkPolicy": {
        **BASE,
        ".spec": "egress ingress podSelector policyTypes",
        ".spec.podSelector": LABELS,
        ".spec.ingress": "from ports",
        ".spec.ingress.ports": "endPort port protocol",
        ".spec.ingress.from": "ipBlock namespaceSelector podSelector",
        ".spec.ingress.from.namespaceSelector": LABELS,
        ".spec.ingress.from.podSelector": LABELS,
    },
    "Gateway": {
        **BASE,
        ".spec": "addresses gatewayClassName infrastructure listeners",
        ".spec.listeners": "allowedRoutes hostname name port protocol tls",
        ".spec.listeners.tls": "certificateRefs mode options",
        ".spec.listeners.tls.certificateRefs": "group kind name namespace",
    },
    "HTTPRoute": ROUTE,
    "GRPCRoute": {**ROUTE, ".spec.rules": "backendRefs filters matches name sessionPersistence"},
}
NAMED = (
    "limits",
    "requests",
    "resources",
    "rayStartParams",
    "nodeSelector",
    "labels",
    "annotations",
    "matchLabels",
)  # by whoever writes them


def unknown(document: Mapping[str, Any]) -> Iterator[str]:
    """Paths in a document, of a RayService unless it says another kind, that nobody knows; and numbers where text is wanted."""
    yield from _unknown(document, KINDS[document.get("kind", "RayService")], "")


def _unknown(value: Any, known: Mapping[str, str], path: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _unknown(item, known, path)
    elif isinstance(value, dict):
        if path.rpartition(".")[2] in NAMED and path not in known:
            yield from (f"{path}.{name} must be text" for name, said in value.items() if not isinstance(said, str))
            return
        for name, said in value.items():
            if name not in known.get(path, "").split():
                yield f"{path}.{name}"
            else:
                yield from _unknown(said, known, f"{path}.{name}")
