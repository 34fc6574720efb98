package cli

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/stockade-run/stockade/internal/demo"
	"github.com/stockade-run/stockade/internal/testmodel"
)

// modelCmd is the script command "model make|wait NAME": a scripted model server
// that has an agent make a file, or run a command that does not end. $NAME is
// its address.
func modelCmd(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 2 || neg {
		ts.Fatalf("usage: model make|wait NAME")
	}
	script := map[string][]testmodel.Turn{
		"make": {{Text: "Let me make it. ", Call: &testmodel.Call{Shell: "echo made > made.txt"}}, {Text: "It is made."}},
		"wait": {{Text: "This takes a while. ", Call: &testmodel.Call{Shell: "echo $$ > child; exec sleep 1000"}}, {Text: "Never said."}},
	}[args[0]]
	m, err := testmodel.Start(testmodel.Config{Script: script, Key: "the-right-key-of-the-model"})
	ts.Check(err)
	ts.Defer(m.Close)
	ts.Setenv(args[1], m.URL())
}

// vendors is the directory of the vendors' programs, or "" where they are not installed.
func vendors() (string, error) {
	root, err := demo.FindCheckout("")
	if err != nil {
		return "", err
	}
	dir, ok := demo.AgentsInstalled(root)
	bin := filepath.Join(dir, "node_modules/.bin")
	if _, err := os.Stat(filepath.Join(bin, "codex-acp")); !ok || err != nil {
		return "", nil
	}
	return bin, nil
}

// condition is "vendors": the vendors' programs are installed; or "sdk": LangBot's
// Python SDK is. Where every part is required it is an error that they are not.
func condition(cond string) (bool, error) {
	var dir, missing string
	var err error
	switch cond {
	case "vendors":
		dir, err = vendors()
		missing = "the vendors' CLIs are not installed: make setup-agents"
	case "sdk":
		dir, err = sdk()
		missing = "the Python SDK of LangBot is not installed: make setup-sdk"
	default:
		return false, fmt.Errorf("unknown condition %q", cond)
	}
	if err == nil && dir == "" && os.Getenv("STOCKADE_REQUIRE") == "all" {
		err = errors.New(missing)
	}
	return dir != "", err
}

// sdk returns the Python with the newest SDK, "" if it is not installed.
func sdk() (string, error) {
	root, err := demo.FindCheckout("")
	if err != nil {
		return "", err
	}
	python := filepath.Join(root, ".cache", "sdk", "0.7", "bin", "python")
	if _, err := os.Stat(python); err != nil {
		return "", nil
	}
	return python, nil
}
