// Package pluginhost owns the plugin installations of a runtime: what LangBot
// wants to run, the workers that run it, and everything a worker may ask for.
//
// A [Manager] is told the desired state (Configure, Apply, Reconcile, Remove),
// keeps one supervisor per dedicated installation and one per shared pool, lets
// workers register, admits each of their messages under an attached and current
// binding only, and forwards them to the [Host]. The control side calls plugins
// through [Plugin] handles, chosen by [Manager.Plugins] for one context.
//
// # Who owns what
//
//	what                                   owner
//	the fencing table, records, pools,     Manager.mu; a leaf: nothing is called
//	registered plugins, links' phases      out while it is held
//	one installation's transition          its key in Manager.keys, from the candidate
//	                                       check to the last stop
//	the reconcile                          Manager.reconciling
//	preparing dependency trees             Manager.limiter, max_concurrent_restarts
//	                                       at a time
//	launching workers                      the gate, so many at a time
//	attaching slots to a pool              pool.life: one at a time; a detach does not
//	                                       wait for a sibling's attach
//	a worker process and its connection    the attempt that started it; others ask by
//	                                       ending the supervisor's context
//	pending capabilities, debug keys       internal/registration, own locks
//	transfers                              internal/transfer, own locks
//
// Lock order: reconciling, keys, limiter, pool.life, mu.
//
// # Goroutines
//
//	supervisor    one per enabled dedicated installation, pool and legacy plugin;
//	              runs the attempts one after another; ended by its cancel, joined
//	              by whoever ended it
//	attempt       runs in the supervisor; starts and joins two: the connection's
//	              reader (rpc.Conn.Run) and the log's (pluginlog.Buffer.Capture)
//	attach        one per slot that is being attached; ended by detaching the slot
//	              or by the connection's end; joined by the pool's stop
//	ServeWorker   the caller's: one debug connection
//
// # Order of a change
//
// The fencing table changes first: from that instant no message of the old
// binding is admitted and no capability of it can be used. Then the old worker is
// stopped: its requests are cancelled, it is told to shut down, its connection is
// closed, its process waited for and in the end killed. Only then is anything new
// scheduled.
package pluginhost
