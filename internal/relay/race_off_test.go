//go:build !race

package relay

// raceEnabled: see race_on_test.go.
const raceEnabled = false
