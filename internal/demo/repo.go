package demo

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"time"

	"github.com/stockade-run/stockade/internal/testagent"
	"github.com/stockade-run/stockade/internal/testmodel"
)

// workspace is where the repository is inside the box.
const workspace = "/workspace"

// The small repository: a program with a fault, and a test that finds it. It
// needs a shell and nothing else.
const (
	programFile = "stats.sh"
	testFile    = "test.sh"

	brokenExpr = "mean=$((sum * count))"
	mendedExpr = "mean=$((sum / count))"

	program = `#!/bin/sh
# Prints the count, the sum and the mean (rounded down) of the numbers given.
count=0 sum=0 mean=0
for n in "$@"; do
	count=$((count + 1))
	sum=$((sum + n))
done
[ "$count" -eq 0 ] || ` + brokenExpr + `
echo "count=$count sum=$sum mean=$mean"
`
	tests = `#!/bin/sh
# Runs the program on a few inputs and says what is wrong with its answers.
cd "$(dirname "$0")" || exit 2
failed=0
check() {
	want=$1
	shift
	got=$(sh stats.sh "$@")
	if [ "$got" = "$want" ]; then
		echo "ok    stats.sh $*"
	else
		echo "FAIL  stats.sh $*: got '$got', want '$want'"
		failed=$((failed + 1))
	fi
}
check 'count=0 sum=0 mean=0'
check 'count=1 sum=1 mean=1' 1
check 'count=3 sum=12 mean=4' 2 4 6
check 'count=4 sum=10 mean=2' 1 2 3 4
[ "$failed" -eq 0 ] && echo 'all tests pass' && exit 0
echo "$failed tests fail"
exit 1
`
	readme = `# stats

` + "`sh stats.sh 2 4 6`" + ` prints count, sum and mean. ` + "`sh test.sh`" + ` runs the tests.
`
	task = "Run `sh test.sh` in the current directory. It fails because of a fault in stats.sh. " +
		"Find the fault, mend it with the smallest possible edit of stats.sh, do not touch test.sh, and run the tests again to show that they pass."
)

// agentScript is what our own agent does with it. The generated text makes the
// stream long enough to be worth comparing.
func agentScript() testagent.Script {
	const burst = 256 << 10
	return testagent.Script{PaceMillis: 25, Steps: []testagent.Step{
		{Think: "A small shell program and a test for it. I should see the test fail before I change anything."},
		{Say: "I will run the tests first, then look at the program."},
		{Run: "sh test.sh", Exit: 1},
		{Read: programFile},
		{Noise: burst},
		{Think: "Two of the four checks fail, and in both only the mean is wrong. For one number it is right. " +
			"The mean of 2, 4 and 6 came out as 36, which is 12 times 3: the program multiplies by the count where it must divide."},
		{Say: "The count and the sum are right in every case, the mean is right only where the count is one or none. " +
			"The program multiplies the sum by the count; the mean is the sum divided by the count. One character mends it."},
		{Noise: burst},
		{Edit: &testagent.Edit{Path: programFile, Old: brokenExpr, New: mendedExpr}},
		{Noise: burst},
		{Say: "Now the tests again, to see that they pass and that nothing else broke."},
		{Run: "sh test.sh"},
		{Noise: burst},
		{Say: "All tests pass. I changed one line of stats.sh and nothing else."},
	}}
}

// modelScript is what the scripted model makes a vendor's CLI do with it.
func modelScript() []testmodel.Turn {
	path := workspace + "/" + programFile
	return []testmodel.Turn{
		{Text: "I will run the tests first, then look at the program.", Call: &testmodel.Call{Shell: "sh test.sh"}},
		{Text: "Only the mean is wrong, and only where there is more than one number. I look at how it is computed.", Call: &testmodel.Call{Read: path}},
		{Text: "The program multiplies the sum by the count; the mean is the sum divided by the count. One character mends it.",
			Call: &testmodel.Call{Edit: &testmodel.Edit{Path: path, Old: brokenExpr, New: mendedExpr}}},
		{Text: "Now the tests again, to see that they pass and that nothing else broke.", Call: &testmodel.Call{Shell: "sh test.sh"}},
		{Text: "All tests pass. I changed one line of stats.sh and nothing else."},
	}
}

// repositoryTar is the repository as a tar stream, with the script of our own
// agent if that is the one.
func repositoryTar(agent string) (io.Reader, error) {
	files := []struct{ name, text string }{{"README.md", readme}, {programFile, program}, {testFile, tests}}
	if agent == agentTest {
		script, err := json.MarshalIndent(agentScript(), "", "  ")
		if err != nil {
			return nil, err
		}
		files = append(files, struct{ name, text string }{testagent.ScriptFile, string(script)})
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.text)), ModTime: time.Now(), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := io.WriteString(w, f.text); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return &b, nil
}
