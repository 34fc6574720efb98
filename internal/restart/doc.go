// Package restart holds the rules of starting plugin workers again: how long a
// supervisor waits ([Backoff]), and which of them may launch now ([Coordinator]).
// Both are values and rules; the package gate makes callers wait for them.
//
// Launches are bounded for the whole runtime and admitted in the order of asking.
// Failures are counted per key, the installation or the pool: enough of them
// within a window open the key's circuit, and while it is open nothing of that
// key launches. After the open time one launch, the probe, is let through; if it
// runs stably the circuit closes, if it fails the circuit opens again.
//
// Whoever waits for a circuit holds no launch slot and no place in the order of
// others, so that a plugin that crashes in a loop never delays another one by
// more than the launches it really makes.
//
// Two things are deliberate. With the default numbers (8 failures in 30 seconds)
// a supervisor that keeps its [Backoff] cannot open a circuit, for 8 failures
// then take at least 98 seconds: the backoff alone holds such a plugin to one
// launch a minute, and the circuit is for what the backoff does not see, repeated
// applies that begin new supervisors, or an operator's lower threshold. And the
// bound on circuits bounds what is remembered, never what may launch: beyond it
// the closed circuit whose last failure is the oldest is forgotten, an open one
// never is. The published SDK refuses the launch instead, by which plugins
// that crash keep a healthy one from starting.
package restart
