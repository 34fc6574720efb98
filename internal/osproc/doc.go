// Package osproc runs one agent as a tree of processes on this machine and ends
// all of it, with a proof or without one, and says which.
//
// Between the caller and the agent stands a keeper: this program started again
// with another first argument ([KeeperMain]). It is the child subreaper of
// everything below it, so a process that left its group, its session or its
// parent comes back to the keeper as a child and is hunted all the same. The
// proof that the tree is gone is the kernel's: wait4 in the keeper answers that
// it has no child left (ECHILD), and a live descendant always has a live
// ancestor that is the keeper's child. Where the caller may make control groups,
// the keeper is put into one of its own before the agent exists; it is the second
// way to kill and to prove, for when the keeper itself was killed.
//
//	caller ── control socket ── keeper (subreaper) ── agent (own session) ── …
//	   └──────────── stdin, stdout, stderr ─────────────┘
//
// When the caller dies, the control socket ends, and the keeper ends the tree by
// itself. What is out of reach: processes that another service starts on the
// agent's behalf, such as a container engine or a job scheduler.
//
// No shell is ever involved: arguments stay arguments.
package osproc
