// Package gateway is what a run can reach from inside its box. A box has no
// route out of its network namespace; the gateway opens one listener per run
// inside that namespace and serves, on the loopback address the run sees,
//
//	/model/PROVIDER/…   the model provider of that name
//
// and nothing else. The provider's real key is added out here, on the way up:
// the run holds only a placeholder. The rights of a run end before the run ends:
// [Gateway.CloseRun] returns when the listener is gone and every call that was
// in flight has ended.
//
// Who runs what: each open run has one goroutine that accepts and serves, one
// that reports usage, and those net/http makes per connection. All of them are
// joined or ended by CloseRun.
package gateway
