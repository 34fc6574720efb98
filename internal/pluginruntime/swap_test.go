package pluginruntime

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/python"
)

// storesOf opens our stores on the data directory of a Python runtime, with an
// interpreter that is asked for nothing: whatever has to be installed fails.
func storesOf(t *testing.T, r *live, sdk string, readOnly bool) (*artifact.Store, *deptree.Store) {
	t.Helper()
	dir := filepath.Join(r.dir, "data", "plugin-runtime")
	interp, err := python.Probe(t.Context(), need.SDK(t, sdk))
	if err != nil {
		t.Fatal(err)
	}
	artifacts, err := artifact.Open(artifact.Config{Dir: filepath.Join(dir, "artifacts"), ReadOnly: readOnly})
	if err != nil {
		t.Fatal(err)
	}
	trees, err := deptree.Open(deptree.Config{Dir: filepath.Join(dir, "environments"), Interp: interp, Profile: "oss_dev", ReadOnly: readOnly})
	if err != nil {
		t.Fatal(err)
	}
	return artifacts, trees
}

// TestSwapKeepsArtifactsAndTrees: what one runtime has published the other uses, in
// both directions, so that an operator can swap and go back.
func TestSwapKeepsArtifactsAndTrees(t *testing.T) {
	t.Parallel()
	for _, sdk := range []string{"0.6", "0.7"} {
		t.Run("to ours "+sdk, func(t *testing.T) {
			t.Parallel()
			r := genuine(t, sdk)
			kit := install(workspace("ws-1"), "kit-1", "kit")(t)
			h := r.connect(lbhost.Config{})
			state, err := h.Apply(t.Context(), kit)
			if err != nil || state.ErrorCode != "" {
				t.Fatalf("%+v, %v", state, err)
			}
			artifacts, trees := storesOf(t, r, sdk, true)
			a, ok, err := artifacts.Lookup(kit.Binding.ArtifactDigest)
			if err != nil || !ok || a.Manifest.Name != "kit" {
				t.Fatalf("the artifact of the Python runtime is not used: %+v, %v, %v", a, ok, err)
			}
			if v, err := artifacts.Verify(t.Context(), a.Digest); err != nil || v.Listed || len(v.Problems) != 0 {
				t.Errorf("%+v, %v", v, err)
			}
			tree, err := trees.Prepare(t.Context(), a.Digest, a.Code)
			if err != nil || tree.Digest != state.DependencyEnvironmentDigest || trees.Counters().CacheHits != 1 {
				t.Errorf("the tree %s of the Python runtime is not used: %+v, %v, %+v", state.DependencyEnvironmentDigest, tree, err, trees.Counters())
			}
		})
		t.Run("from ours "+sdk, func(t *testing.T) {
			t.Parallel()
			r := genuine(t, sdk)
			kit := install(workspace("ws-1"), "kit-1", "kit")(t)
			artifacts, trees := storesOf(t, r, sdk, false)
			a, err := artifacts.Install(t.Context(), kit.Binding.ArtifactDigest, kit.Package)
			if err != nil {
				t.Fatal(err)
			}
			tree, err := trees.Prepare(t.Context(), a.Digest, a.Code)
			if err != nil {
				t.Fatal(err)
			}
			before := marks(t, a.Root, tree.Root)
			kit.Package = nil // it must be there already
			h := r.connect(lbhost.Config{})
			state, err := h.Apply(t.Context(), kit)
			if err != nil || state.State == "artifact_missing" || state.ErrorCode != "" || state.DependencyEnvironmentDigest != tree.Digest {
				t.Fatalf("the Python runtime does not use what ours published (tree %s): %+v, %v", tree.Digest, state, err)
			}
			running(t, h, kit)
			for i, after := range marks(t, a.Root, tree.Root) {
				if !os.SameFile(before[i], after) {
					t.Errorf("%s was made again", after.Name())
				}
			}
		})
	}
}

// TestSameVerdictOnRequirements: the published runtimes and ours admit the same
// requirements.txt, and refuse in recognisable words.
func TestSameVerdictOnRequirements(t *testing.T) {
	t.Parallel()
	lines := []string{"", "# only a comment", "langbot-plugin", "LangBot.Plugin >= 0.5", "langbot-plugin~=0.6.0", "langbot-plugin==0.6.1", "langbot-plugin==0.6.3",
		"langbot-plugin==0.7.18", "langbot-plugin>=0.7", "langbot-plugin==9; python_version < '3'", "langbot-plugin @ https://h.invalid/x.whl",
		"-r more.txt", "  -e .", "x # why", "./x.whl", "git+https://h.invalid/x.git", "x==1 --hash=sha256:00", "\n\n--pre", "langbot-plugin\f-i http://h.invalid/"}
	words := []string{"pip options (line ", "invalid requirement (line ", "the Runtime provides langbot-plugin==", "direct URL"}
	for _, sdk := range []string{"0.6", "0.7"} {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			r := genuine(t, sdk)
			h := r.connect(lbhost.Config{})
			artifacts, trees := storesOf(t, r, sdk, true)
			for i, line := range lines {
				installed := install(workspace("ws-1"), fmt.Sprint("line-", i), "kit", "langbot-plugin", line)(t)
				state, err := h.Apply(t.Context(), installed)
				if err != nil {
					t.Fatalf("%q: %v", line, err)
				}
				if _, err := h.Remove(t.Context(), installed.Binding); err != nil {
					t.Error(err)
				}
				// The tree of the other runtime is there if it admitted the line.
				a, ok, err := artifacts.Lookup(installed.Binding.ArtifactDigest)
				if err != nil || !ok {
					t.Fatalf("%q: %v, %v", line, ok, err)
				}
				_, err = trees.Prepare(t.Context(), a.Digest, a.Code)
				if (err == nil) != (state.ErrorCode == "") {
					t.Errorf("%q: the published runtime says %q, ours %v", line, state.Message, err)
				}
				for _, w := range words {
					if err != nil && strings.Contains(state.Message, w) != strings.Contains(err.Error(), w) {
						t.Errorf("%q: the published runtime says %q, ours %v", line, state.Message, err)
					}
				}
			}
		})
	}
}

// marks are the files whose identity shows that a directory is still the same.
func marks(t *testing.T, artifactRoot, treeRoot string) []fs.FileInfo {
	t.Helper()
	var infos []fs.FileInfo
	var errs []error
	for _, path := range []string{artifactRoot + "/.verified-sha256", artifactRoot + "/.files.json", treeRoot + "/.ready.json", treeRoot + "/.admission.json"} {
		info, err := os.Lstat(path)
		infos, errs = append(infos, info), append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return infos
}
