package cli

import (
	"os"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/stockade-run/stockade/internal/demo"
)

// TestRuntimeFlagsAreDocumented holds docs/runtime.md to the command.
func TestRuntimeFlagsAreDocumented(t *testing.T) {
	t.Parallel()
	root, err := demo.FindCheckout("")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile(root + "/docs/runtime.md")
	if err != nil {
		t.Fatal(err)
	}
	(&app{}).runtimeCommand().Flags().VisitAll(func(f *pflag.Flag) {
		if !strings.Contains(string(doc), "`--"+f.Name+"`") {
			t.Errorf("docs/runtime.md does not say what --%s does", f.Name)
		}
	})
}
