// Package pluginwire is the action RPC between LangBot, its Plugin Runtime and
// plugin workers, as rules without mechanism: envelopes, contexts and their
// strict decoding, the actions with their scopes and times, the two framings and
// every limit of the protocol.
//
// The facts come from the published peers: LangBot 4.10 and 4.11 on the one side,
// the Python SDK 0.5.5, 0.6.3 and 0.7 on the other. Where they differ, what is
// sent is what all of them accept, and what is received is what any of them sends.
package pluginwire
