// Package host is the host API (package wire): [Serve] is its server half, the
// program that runs on a machine where processes run, and [Client] its client
// half, what a server speaks to it with over any byte stream.
//
// The host keeps one directory. Everything it promises rests on that directory
// and on the shims beside the processes, never on its own memory: it may be
// killed at any moment, and the next one finds every process again by directory,
// boot id and start time.
//
// # One process, one owner
//
// Every directory under procs/ has one goroutine, its owner, that launches the
// shim, follows it by one long poll, and settles the process when the shim died
// without an exit record. Handlers read the owner's published state and talk to
// the shim's client; they never change the state themselves.
//
//	PUT ──▶ spec.json durable ──▶ bundle ──▶ registered (accepted) ──▶ answer
//	                                             │ owner
//	                                             ├──▶ shim started ──▶ followed ──▶ ended
//	                                             └──▶ shim dead: container killed, cgroup
//	                                                  proven empty, exit unknown ──▶ ended
//
// # Errors of the client
//
// An error that the host answered matches [ErrAnswered] and carries the host's
// code: the request was refused and, unless the code is indeterminate or
// internal, not carried out. Every other error is unavailable when the request
// certainly was not carried out or only asked something, and indeterminate when
// it may have been.
package host
