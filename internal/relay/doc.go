// Package relay is the hub of coding-relay-v1: daemons on users' machines connect
// to it over WebSocket, and callers hand them jobs.
//
// Who owns what:
//
//	Hub      the registry: links by daemon id, jobs by id, a target per daemon id.
//	         One mutex; every change of a target goes through FenceStep.
//	link     one incarnation of one daemon: one reader goroutine, and one writer
//	         while there is something to send.
//	Job      one owner goroutine from admission until the job is settled.
//	queue    the unread events of one job: memory, then disk, then the job waits.
//
// What a caller may rely on:
//
//   - A job belongs to the connection it was sent on. Frames about it from any
//     other connection have no effect, whatever they know.
//   - Leaving is settling. When RunJob's context ends, the job's time is over,
//     Cancel is called or the hub stops, the job's tools are revoked first, then
//     run.cancel is sent, and nothing returns before run.finished came or the
//     daemon is fenced.
//   - Before run.start is sent a marker of the daemon is on disk and synced (when
//     the hub has a state directory). It goes only when every job of the daemon was
//     acknowledged, or by ClearFence. A marker that a hub finds when it starts is a
//     fence.
//   - A fence is lifted by ClearFence only. A late run.finished is recorded as
//     evidence, nothing more.
package relay
