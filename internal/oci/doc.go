// Package oci finds the OCI runtime of a machine and says what a container is.
//
// [Spec] is a pure function from what a box is made of to the runtime's
// configuration. Everything that confines a tenant's process stands there, and
// the golden files in testdata show every line of it:
//
//   - own user, PID, mount, IPC, UTS and cgroup namespaces; the box's network namespace
//   - no capability in any set, no-new-privileges, user 1000:1000 without groups
//   - the seccomp profile published as docs/seccomp.json
//   - a read-only root; only the volumes, allowed writable mounts, /tmp and /dev/shm can be written
//   - no sysfs, no device but null, zero, full, random, urandom, tty and the box's own terminals
package oci
