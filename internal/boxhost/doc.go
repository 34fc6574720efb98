// Package boxhost owns the boxes of one machine: their volumes, network
// namespaces, control groups, user ids, root directories and mounts, and makes
// the bundle a process is started from.
//
//	DIR/boxes/ID/box.json   what the box is; durable before anything else is made
//	             netns      the pinned network namespace
//	             vol/       workspace, home, cache: owned by the box's user 1000
//	             etc/       the few files of /etc that are the box's own
//	             root/      the root directory: mount points and links, nothing else
//	             mnt/N      the N-th mount, pinned so that its source cannot be swapped
//	DIR/images/             see package image
//
// A box is recorded before it is made, and marked before it is removed, so both
// are finished after a crash. What a reboot takes away (namespace, control
// group, pinned mounts) is made again when the box is used next.
//
// The root directory must be reachable for the box's own user ids. Where DIR
// lies below a directory that others may not enter, such as /root, it is kept
// at /run/stockade/ID instead, where programs may be run even if /run is mounted
// noexec; everything else is bind-mounted by the runtime
// and may lie anywhere.
//
// Locking: Manager.mu guards the table of boxes and their uid slots and is held
// briefly; box.mu is held during whatever changes one box's files. mu is never
// held while waiting for a box.mu: the order is box.mu, then Manager.mu.
package boxhost
