package boxhost

import (
	"path/filepath"
	"testing"

	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/wire"
)

// BenchmarkBundle is what a start in a warm box costs before the runtime runs.
func BenchmarkBundle(b *testing.B) {
	f := newFixture(b, nil)
	id := f.put(nil)
	spec := wire.ProcSpec{ID: newID(ident.Process), Box: id, Argv: []string{"true"}}
	dir := filepath.Join(f.cfg.Dir, "bundle")
	for b.Loop() {
		if _, err := f.Bundle(b.Context(), spec, dir); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRun is a whole container with this specification.
func BenchmarkRun(b *testing.B) {
	f := newFixture(b, nil)
	id := f.put(nil)
	for b.Loop() {
		if out, code := f.run(id, "", "/bin/true"); code != 0 {
			b.Fatal(out)
		}
	}
}
