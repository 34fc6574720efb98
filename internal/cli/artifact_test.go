package cli

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/python"
)

// makeDataCmd publishes packages, and a tree without requirements for each. The
// tree's digest is ${NAME}_TREE; no record of use is left.
func makeDataCmd(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: make-data DIR NAME…")
	}
	dir := filepath.Join(ts.MkAbs(args[0]), "plugin-runtime")
	artifacts, err := artifact.Open(artifact.Config{Dir: filepath.Join(dir, "artifacts")})
	ts.Check(err)
	trees, err := deptree.Open(deptree.Config{Dir: filepath.Join(dir, "environments"), Interp: python.Interpreter{Path: "/none"}, Profile: "oss_dev"})
	ts.Check(err)
	for _, name := range args[1:] {
		var b bytes.Buffer
		z := zip.NewWriter(&b)
		for file, content := range map[string]string{"manifest.yaml": "kind: Plugin\nmetadata: {author: me, name: " + name + ", version: 1.2}\n", "main.py": "print()\n"} {
			w, err := z.Create(file)
			ts.Check(err)
			_, err = w.Write([]byte(content))
			ts.Check(err)
		}
		ts.Check(z.Close())
		sum := sha256.Sum256(b.Bytes())
		digest := hex.EncodeToString(sum[:])
		a, err := artifacts.Install(context.Background(), digest, b.Bytes())
		ts.Check(err)
		tree, err := trees.Prepare(context.Background(), a.Digest, a.Code)
		ts.Check(err)
		ts.Setenv(name, a.Digest)
		ts.Setenv(name+"_TREE", tree.Digest)
	}
}
