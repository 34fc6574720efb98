package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginruntime"
)

// artifactCommand works on a data directory of the plugin runtime, not on a server.
func (a *app) artifactCommand() *cobra.Command {
	c := &cobra.Command{Use: "artifact", Short: "Look at, verify and remove the plugin runtime's packages", Args: cobra.NoArgs}
	data := "data"
	c.PersistentFlags().StringVar(&data, "data-dir", data, "data directory of the plugin runtime")
	var trees bool
	ls := &cobra.Command{
		Use: "ls", Short: "List plugin packages, or dependency trees", Args: cobra.NoArgs,
		Long:    "Lists the plugin packages that the runtime keeps, by digest. USED is when one was last asked for.",
		Example: "  stockade artifact ls\n  stockade artifact ls --trees --data-dir /srv/langbot/data",
		RunE: func(*cobra.Command, []string) error {
			if trees {
				return a.showTrees(data)
			}
			return a.showArtifacts(data)
		},
	}
	ls.Flags().BoolVar(&trees, "trees", false, "list the dependency trees instead")
	var remove bool
	verify := &cobra.Command{
		Use: "verify [DIGEST…]", Short: "Hash plugin packages again and compare them with what was published",
		Long: `Reads every file of the packages, all or those named, and compares content, kinds and modes
with the listing made when the package was published. A package that the Python runtime published
has no listing: its files are read, but there is nothing to compare them with. Exit status 13 if
anything differs. --remove takes what differs away, while no runtime runs: LangBot uploads it again
when the runtime says that it is missing.`,
		Example: "  stockade artifact verify\n  stockade artifact verify $(stockade artifact ls --json | jq -r .items[0].digest)\n  stockade artifact verify --remove",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.verifyArtifacts(cmd.Context(), data, args, remove)
		},
	}
	verify.Flags().BoolVar(&remove, "remove", false, "remove the packages that differ")
	var unused time.Duration
	var blind bool
	gc := &cobra.Command{
		Use: "gc", Short: "Remove plugin packages and dependency trees that nothing uses", Args: cobra.NoArgs,
		Long: `Removes packages and dependency trees that no installation of the last runtime used and that
were not asked for lately, and what crashed attempts left. It refuses while a runtime runs on the
directory. What is removed and wanted again, LangBot uploads again.`,
		Example: "  stockade artifact gc\n  stockade artifact gc --unused-for 0s --without-record",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.collectArtifacts(cmd.Context(), data, unused, blind)
		},
	}
	gc.Flags().DurationVar(&unused, "unused-for", 7*24*time.Hour, "keep what was asked for within this time")
	gc.Flags().BoolVar(&blind, "without-record", false, "also where no runtime has left a record of what installations use")
	c.AddCommand(ls, verify, gc)
	return c
}

// runtimeDir is the part of a data directory that belongs to the runtime. That it
// is not there is an error: a mistyped directory must not look empty.
func runtimeDir(data string) (string, error) {
	dir := filepath.Join(data, "plugin-runtime")
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return "", errdefs.New(errdefs.NotFound, "%s is not a data directory of a plugin runtime: it has no directory plugin-runtime", data).
			WithNext("name it with --data-dir")
	}
	return dir, nil
}

// stores opens what a data directory keeps.
func stores(data string, readOnly bool) (*artifact.Store, *deptree.Store, error) {
	dir, err := runtimeDir(data)
	if err != nil {
		return nil, nil, err
	}
	artifacts, err := artifact.Open(artifact.Config{Dir: filepath.Join(dir, "artifacts"), ReadOnly: readOnly})
	if err != nil {
		return nil, nil, err
	}
	trees, err := deptree.Open(deptree.Config{Dir: filepath.Join(dir, "environments"), ReadOnly: readOnly})
	return artifacts, trees, err
}

func (a *app) showArtifacts(data string) error {
	artifacts, _, err := stores(data, true)
	if err != nil {
		return err
	}
	items, err := artifacts.List()
	if err != nil {
		return err
	}
	return show(a, items, []string{"DIGEST", "PLUGIN", "VERSION", "SIZE", "FILES", "USED", "STATE"}, func(i artifact.Item, now time.Time) []string {
		return []string{i.Digest, i.Author + "/" + i.Name, i.Version, size(i.Bytes), fmt.Sprint(i.Files), age(now, i.LastUsed), state(i.Problem)}
	})
}

func (a *app) showTrees(data string) error {
	_, trees, err := stores(data, true)
	if err != nil {
		return err
	}
	items, err := trees.List()
	if err != nil {
		return err
	}
	return show(a, items, []string{"DIGEST", "ARTIFACT", "SIZE", "FILES", "USED", "STATE"}, func(i deptree.Item, now time.Time) []string {
		return []string{i.Digest, i.Artifact, size(i.Bytes), fmt.Sprint(i.Files), age(now, i.LastUsed), state(i.Problem)}
	})
}

func state(problem string) string {
	if problem == "" {
		return "ready"
	}
	return "damaged: " + problem
}

func (a *app) verifyArtifacts(ctx context.Context, data string, digests []string, remove bool) error {
	if remove {
		if _, err := runtimeDir(data); err != nil {
			return err
		}
		unlock, err := pluginruntime.Lock(data)
		if err != nil {
			return err
		}
		defer unlock()
	}
	artifacts, _, err := stores(data, !remove)
	if err != nil {
		return err
	}
	if len(digests) == 0 {
		items, err := artifacts.List()
		if err != nil {
			return err
		}
		for _, i := range items {
			digests = append(digests, i.Digest)
		}
	}
	done := a.progress("verifying")
	results, bad := []artifact.Verification{}, 0
	for _, d := range digests {
		v, err := artifacts.Verify(ctx, d)
		if err != nil {
			done()
			return err
		}
		if results = append(results, v); len(v.Problems) == 0 {
			continue
		}
		bad++
		if remove {
			if err := artifacts.Remove(ctx, d); err != nil {
				done()
				return err
			}
		}
	}
	done()
	if err := a.showVerified(results); err != nil {
		return err
	}
	switch {
	case bad > 0 && remove:
		return errdefs.New(errdefs.Conflict, "%d of %d packages differed from what was published and were removed", bad, len(results)).
			WithNext("start the runtime; LangBot uploads them again")
	case bad > 0:
		return errdefs.New(errdefs.Conflict, "%d of %d packages differ from what was published", bad, len(results)).
			WithNext("stop the runtime, then stockade artifact verify --remove")
	}
	return nil
}

func (a *app) showVerified(results []artifact.Verification) error {
	if a.json {
		return a.printJSON(client.List[artifact.Verification]{Items: results})
	}
	for _, v := range results {
		said := fmt.Sprintf("%d files as published", v.Files)
		switch {
		case len(v.Problems) > 0:
			said = strings.Join(v.Problems, "; ")
		case !v.Listed:
			said = fmt.Sprintf("%d files read, nothing to compare them with: the Python runtime published it", v.Files)
		}
		if _, err := fmt.Fprintln(a.Stdout, v.Digest, printable(said)); err != nil {
			return err
		}
	}
	return nil
}

// collected is what gc prints with --json.
type collected struct {
	Artifacts []string `json:"artifacts"`
	Trees     []string `json:"trees"`
	Bytes     int64    `json:"bytes"`
}

func (a *app) collectArtifacts(ctx context.Context, data string, unused time.Duration, blind bool) (err error) {
	dir, err := runtimeDir(data)
	if err != nil {
		return err
	}
	unlock, err := pluginruntime.Lock(data)
	if err != nil {
		return err
	}
	defer unlock()
	use, ok, err := artifact.LoadUse(dir)
	if err != nil {
		return err
	}
	if !ok && !blind {
		return errdefs.New(errdefs.Conflict, "no runtime has left a record of what installations use in %s", dir).
			WithNext("start stockade runtime once, or pass --without-record: what is missing then, LangBot uploads again")
	}
	artifacts, trees, err := stores(data, false)
	if err != nil {
		return err
	}
	done := a.progress("removing")
	before := time.Now().Add(-unused)
	gone := collected{Artifacts: []string{}, Trees: []string{}}
	// Trees first: a tree without its artifact is of no use, the other way round is.
	removed, treeBytes, treeErr := trees.Collect(ctx, set(use.Trees), before)
	gone.Trees = append(gone.Trees, removed...)
	removed, bytes, err := artifacts.Collect(ctx, set(use.Artifacts), before)
	gone.Artifacts = append(gone.Artifacts, removed...)
	gone.Bytes = bytes + treeBytes
	done()
	if a.json {
		return errors.Join(a.printJSON(gone), treeErr, err)
	}
	for _, d := range gone.Artifacts {
		fmt.Fprintln(a.Stdout, "artifact", d)
	}
	for _, d := range gone.Trees {
		fmt.Fprintln(a.Stdout, "tree", d)
	}
	a.say("removed %d packages and %d dependency trees, %s", len(gone.Artifacts), len(gone.Trees), size(gone.Bytes))
	return errors.Join(treeErr, err)
}

func set(list []string) map[string]bool {
	m := make(map[string]bool, len(list))
	for _, s := range list {
		m[s] = true
	}
	return m
}
