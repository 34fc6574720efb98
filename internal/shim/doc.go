// Package shim is the keeper of one process: a small program that starts the
// container, owns its pipes or terminal, writes what the child says into the
// spool, enforces the deadline and the lease, proves that the tree is gone, and
// writes the exit record. It outlives the host program that started it.
//
// The package holds both ends. [Main] is the body of the keeper, [Start], [Find]
// and [Client] are what the host program uses, and [InitMain] is PID 1 inside
// the container, which forks the tenant's command.
//
// What a process directory holds:
//
//	keep.json   what to start (Config); written by the host before Start
//	shim.lock   held by the living shim
//	shim.json   which process that is: pid, start time, boot id
//	starting    exists from just before the runtime was asked to start: never start again
//	shim.sock   the private API for Client
//	log/        the spool
//	exit.json   the durable exit record
//	shim.log    what the shim had to complain about
//	init.pid    what the runtime said of the container's init
//	runtime.log what the runtime had to complain about
//
// Inside a shim one goroutine, the keeper, owns the state. What happens comes to
// it as events; process.KeepStep answers with the new state and effects, which
// are carried out after the state is recorded.
package shim
