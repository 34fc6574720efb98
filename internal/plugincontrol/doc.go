// Package plugincontrol is the Plugin Runtime's side of the control connection:
// what LangBot may ask, in which scope, and how each action is answered from the
// plugins that run.
//
// One connection is the active one. A newer one takes its place at once: every
// request of the older is refused from then on, what it has in flight is
// cancelled, and it is closed. Until a connection has said who it is
// (set_runtime_config), it may only ping.
//
//	LangBot ──control connection──▶ Control ──Manager──▶ plugins
//	        ◀──host actions──────── Link    ◀────────── plugins
//
// Payloads are passed on as they came: only the fields that the protocol makes
// the Runtime responsible for (scope, sequence, file keys) are read or written.
// The facts are those of LangBot 4.10 and 4.11 and the published SDK 0.5.5,
// 0.6.3 and 0.7.
package plugincontrol
