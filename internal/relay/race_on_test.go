//go:build race

package relay

// raceEnabled: the race detector's own memory is in every figure.
const raceEnabled = true
