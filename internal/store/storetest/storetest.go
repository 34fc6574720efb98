// Package storetest holds what every ledger must do: a conformance suite of the
// promises in package store, and [Memory], the model that random sequences of
// operations compare a ledger with.
package storetest

import (
	"testing"

	"github.com/stockade-run/stockade/internal/store"
)

// Config says how to get a ledger.
type Config struct {
	// Open returns a new, empty one. The suite closes it.
	Open func(t testing.TB) store.Store
	// Reopen closes a ledger and opens the same again, as a restart does. Nil skips
	// what is about durability.
	Reopen func(t testing.TB, s store.Store) store.Store
}

// Run runs the whole suite.
func Run(t *testing.T, cfg Config) {
	for _, c := range []struct {
		name string
		test func(*world)
	}{
		{"Instance", testInstance},
		{"Workspaces", testWorkspaces},
		{"Keys", testKeys},
		{"Targets", testTargets},
		{"BoxReuseKey", testBoxReuseKey},
		{"BoxCapacity", testBoxCapacity},
		{"BoxStates", testBoxStates},
		{"BoxInUse", testBoxInUse},
		{"BoxIdle", testBoxIdle},
		{"RunCreate", testRunCreate},
		{"RunExclusive", testRunExclusive},
		{"RunStates", testRunStates},
		{"RunUsage", testRunUsage},
		{"RunRetention", testRunRetention},
		{"ProcessOnce", testProcessOnce},
		{"ProcessOnceConcurrently", testProcessOnceConcurrently},
		{"ProcessRefusals", testProcessRefusals},
		{"ProcessTombstone", testProcessTombstone},
		{"ProcessCapacity", testProcessCapacity},
		{"ProcessCapacityConcurrently", testProcessCapacityConcurrently},
		{"Kept", testKept},
		{"ExcessLogs", testExcessLogs},
		{"ProcessFields", testProcessFields},
		{"ProcessFilter", testProcessFilter},
		{"SaveVersion", testSaveVersion},
		{"SaveConcurrently", testSaveConcurrently},
		{"SaveIdentity", testSaveIdentity},
		{"SaveAtomic", testSaveAtomic},
		{"Fences", testFences},
		{"FenceOfTarget", testFenceOfTarget},
		{"Receipts", testReceipts},
		{"Scope", testScope},
		{"Paging", testPaging},
		{"Audit", testAudit},
		{"InvalidRecords", testInvalidRecords},
		{"Context", testContext},
		{"Closed", testClosed},
		{"Durable", testDurable},
		{"EqualsModel", testEqualsModel},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.test(newWorld(t, cfg))
		})
	}
}
