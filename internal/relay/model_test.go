package relay

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// spin checks one property of the Promela model and returns how many errors it found.
// "" checks the assertions and the end states.
func spin(t *testing.T, bug int, property string) (faults int, report string) {
	t.Helper()
	tool, cc := need.Tool(t, "spin", "spin"), need.Tool(t, "gcc", "gcc")
	model, err := filepath.Abs("testdata/fence.pml")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	run := func(name string, args ...string) string {
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
		return string(out)
	}
	run(tool, "-a", fmt.Sprintf("-DBUG=%d", bug), model)
	flags, args := []string{"-O1", "-w", "-DVECTORSZ=2048", "-o", "pan", "pan.c"}, []string{"-m200000"}
	switch property {
	case "":
		flags = append(flags, "-DNOCLAIM", "-DSAFETY")
	case "ends":
		flags = append(flags, "-DNFAIR=4")
		args = append(args, "-a", "-f", "-N", property)
	default:
		args = append(args, "-a", "-N", property)
	}
	run(cc, flags...)
	report = run("./pan", args...)
	if strings.Contains(report, "max search depth too small") {
		t.Fatalf("the model was not searched to its end:\n%s", report)
	}
	at := strings.Index(report, "errors: ")
	if at < 0 {
		t.Fatalf("no result in:\n%s", report)
	}
	if _, err := fmt.Sscan(report[at+len("errors: "):], &faults); err != nil {
		t.Fatal(err)
	}
	return faults, report
}

// The model of job, cancel and fence holds, and each planted fault is found.
func TestPromelaModel(t *testing.T) {
	t.Parallel()
	for _, property := range []string{"", "safe", "ends"} {
		if n, report := spin(t, 0, property); n != 0 {
			t.Errorf("property %q is broken:\n%s", property, report)
		}
	}
	for bug, property := range map[int]string{1: "safe", 2: "safe", 3: "safe", 4: "", 5: "safe"} {
		if n, report := spin(t, bug, property); n == 0 {
			t.Errorf("the planted fault %d was not found by %q:\n%s", bug, property, report)
		}
	}
}
