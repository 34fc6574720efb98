// Package lbhost plays LangBot for tests and the benchmark: it connects to a
// Plugin Runtime, ours or the published Python one, goes through the handshake
// that LangBot 4.11 makes, asks everything that LangBot asks, and answers what
// plugins ask of LangBot by a [Script] that also remembers it.
//
// A [Host] is one connection; a Script outlives connections, as LangBot's
// database does.
package lbhost
