"""Ranks as pods of a Kubernetes Indexed Job, one rank a pod.

Copy this folder as profile_kubernetes into your IPython folder and set IMAGE: the copy is then
used. The notebook has to run where `kubectl` works and pods can open connections to it, such as
in a pod of the same cluster. Its account may create, delete and list jobs and secrets, and list
pods.
"""

# An image with Python, torch and nbdist, of the notebook's versions: "registry/name:tag".
IMAGE = ""
GPUS = 1  # of each rank; 0 for ranks on CPUs
CPUS = "4"
MEMORY = "16Gi"

if not IMAGE:
    raise ValueError(
        "no image is set. Copy its folder as profile_kubernetes into your IPython folder "
        "(`ipython locate` prints it), and set IMAGE in the copy"
    )

c = get_config()  # noqa: F821

c.Nbdist.note = (
    "The profile kubernetes has run with a stand-in for kubectl, not on a real cluster yet: "
    "see docs/hosts.md."
)
c.Nbdist.state_command = ["kubectl", "get", "pods", "--selector", "job-name={job}"]

c.Cluster.engine_launcher_class = "batch"
c.Cluster.delay = 0  # the controller's connection file is waited for
# Where the address of the default route is not the one that pods reach:
# c.Cluster.controller_args = ["--IPController.engine_ip=10.0.0.7"]

c.BatchEngineSetLauncher.submit_command = ["kubectl", "create", "-f"]
c.BatchEngineSetLauncher.delete_command = [
    "kubectl",
    "delete",
    "--ignore-not-found",
    "--wait=false",
    "job,secret",
]
# The name of both.
c.BatchEngineSetLauncher.job_id_regexp = r"/(nbdist-\S+) created"
c.BatchEngineSetLauncher.job_id_regexp_group = 1
c.BatchEngineSetLauncher.namespace = {
    "image": IMAGE,
    "resources": {"cpu": CPUS, "memory": MEMORY} | ({"nvidia.com/gpu": GPUS} if GPUS else {}),
}
# The controller's key is in the Secret alone, which is deleted with the Job.
c.BatchEngineSetLauncher.batch_template = """\
apiVersion: v1
kind: Secret
metadata:
  name: nbdist-{cluster_id}
stringData: {environment_json}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: nbdist-{cluster_id}
spec:
  completionMode: Indexed
  completions: {n}
  parallelism: {n}
  backoffLimit: 0
  ttlSecondsAfterFinished: 300
  template:
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      containers:
      - name: rank
        image: {image}
        # The folder of its profile is the notebook's, and not here.
        command: [env, -u, IPP_PROFILE_DIR, python, -m, ipyparallel.engine]
        envFrom:
        - secretRef: {{name: nbdist-{cluster_id}}}
        resources:
          requests: {resources}
          limits: {resources}
        volumeMounts:
        - {{name: shm, mountPath: /dev/shm}}
      volumes:
      - name: shm  # data loaders' workers need more than a container's 64 MB
        emptyDir: {{medium: Memory}}
"""
