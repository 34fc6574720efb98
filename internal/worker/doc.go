// Package worker starts the processes of plugins, workers and the installers of
// their dependencies, and ends them with everything they have forked.
//
// There are two launchers. [Direct] starts plain processes of this user for the
// profile oss_dev: nothing stands between the runtime and the worker but two
// pipes. [Box] starts each in a container of the core for the profile shared:
//
//	/plugin, /plugin-dependencies   code and dependencies, read-only
//	/home, /tmp, /data              the installation's own; a pool has its scratch as /tmp and no other
//	the interpreter, /usr, …        read-only
//
// with the core's confinement (package oci): own user, PID, mount, IPC, UTS and
// cgroup namespaces, no capability, no-new-privileges, the seccomp profile, a
// read-only root. Limits come from the policy: processors, memory and tasks by
// control group, open files, file size and tasks by rlimit. PID 1 is the core's
// init; the worker's standard streams are the runtime's pipes in both cases.
//
// # Secrets
//
// A worker's registration capability is in its environment and nowhere else. A
// box's environment reaches the OCI runtime in a file that only root can read, in
// memory where the machine has a place for that, deleted when the box has started.
//
// # Users
//
// Each running box has a range of user ids of its own. The directories it may
// write to are made its user's before it starts, with mode 0700; which range it
// had is read from them, so that it mostly gets the same again.
//
// # Installers
//
// A boxed installer has a network namespace with loopback alone. In it listens a
// proxy of the runtime that passes on what goes to the hosts of the package index.
//
// # What is left
//
// A worker ends when its pipes do, a direct one also by the kernel when the
// runtime dies (except where the process has changed its user ids). What a killed
// runtime has left all the same, in control groups, containers, mounts and files,
// is ended and taken away when a launcher is opened for the same data directory;
// the runtime's lock on that directory is what makes that safe. Where this user
// can make no control groups, a direct worker's process that has left its process
// group is out of reach.
package worker
