package plugincontrol

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/stockade-run/stockade/internal/rpc"
)

// directory is one directory of the runtime's data, as get_storage_analysis says it.
type directory struct {
	Key    string `json:"key"`
	Path   string `json:"path"`
	Kind   string `json:"kind"` // root: counts in the sum
	Exists bool   `json:"exists"`
	Size   int64  `json:"size_bytes"`
	Files  int64  `json:"file_count"`
	Errors int64  `json:"error_count"`
}

// storageRoots are the directories, by key, below the data directory.
var storageRoots = [][2]string{
	{"legacy_plugins", "plugins"},
	{"artifacts", "plugin-runtime/artifacts"},
	{"dependency_environments", "plugin-runtime/environments"},
	{"installations", "plugin-runtime/installations"},
	{"staging", ".plugin-staging"},
	{"rpc_transfer", "temp/lbp"},
}

func getStorageAnalysis(ctx context.Context, s *session, _ *rpc.Inbound) (any, error) {
	out := make([]directory, 0, len(storageRoots))
	var sum int64
	for _, root := range storageRoots {
		d, err := measure(ctx, filepath.Join(s.control.cfg.DataDir, filepath.FromSlash(root[1])))
		if err != nil {
			return nil, err
		}
		d.Key, d.Kind = root[0], "root"
		sum += d.Size
		out = append(out, d)
	}
	return map[string]any{"size_bytes": sum, "directories": out}, nil
}

// measure adds up a tree without following links. What cannot be read counts as
// an error and nothing else.
func measure(ctx context.Context, root string) (directory, error) {
	d := directory{Path: root}
	info, err := os.Lstat(root)
	if err != nil || !info.IsDir() {
		return d, nil
	}
	d.Exists = true
	err = filepath.WalkDir(root, func(_ string, e fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			d.Errors++
			if e != nil && e.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if e.Type().IsRegular() {
			info, err := e.Info()
			if err != nil {
				d.Errors++
				return nil
			}
			d.Files++
			d.Size += info.Size()
		}
		return nil
	})
	return d, err
}
