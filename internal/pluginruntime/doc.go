// Package pluginruntime is "stockade runtime", put together: it locks the data
// directory, opens the stores, and serves LangBot on the control channel and
// workers that connect by themselves on the plugin channel, until it is told to
// stop. Nothing else in the tree knows all the parts.
//
// It starts in this order, and stops in the reverse of it:
//
//	interpreter                    it must have the SDK, or nothing is made at all
//	lock of the data directory     two runtimes on one directory are a conflict
//	stores                         artifacts, dependency trees, transfers
//	plugin host, control           they know each other through plugincontrol.Link
//	listeners, or standard input   LangBot may come; nothing runs before it has said who it is
package pluginruntime
