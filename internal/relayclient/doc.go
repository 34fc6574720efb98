// Package relayclient is the machine's side of coding-relay-v1: it connects to a
// hub, runs the jobs that the hub sends, and says run.finished about a job only
// when every process of it is proven gone.
//
// Who owns what:
//
//	Run      the loop: connect, serve, end every job, connect again.
//	session  one connection: a reader, a writer and a pinger. The reader never
//	         waits for a job, the writer never for a runner.
//	outbox   what waits to be sent: acknowledgements first, then tool calls, then
//	         the jobs' events in turn. Each job has a bounded queue of its own, so
//	         a hub that does not read stops only who has something to say.
//	job      one goroutine from run.start until run.finished is queued. A cancel
//	         reaches its runner once; nothing interrupts the clean-up.
//	proxy    one per job: the host's tools for the agent, on a port of this
//	         machine, with a token of its own. Dead before run.finished.
//
// A job whose end is not confirmed is never acknowledged: the connection is closed
// with 1011, the other jobs are ended, and Run returns an error and does not
// connect again. A person must look.
package relayclient
