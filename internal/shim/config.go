package shim

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/wire"
)

// Names of the files in a process directory.
const (
	configFile   = "keep.json"
	lockFile     = "shim.lock"
	identityFile = "shim.json"
	markerFile   = "starting"
	socketFile   = "shim.sock"
	exitFile     = "exit.json"
	logFile      = "shim.log"
	spoolDir     = "log"
)

// Config is what a shim is told to keep: the content of keep.json.
type Config struct {
	Spec         wire.ProcSpec `json:"spec"`
	Runtime      string        `json:"runtime"`                 // absolute path of the OCI runtime
	Manner       oci.Manner    `json:"manner"`                  // and how it differs from others
	RuntimeRoot  string        `json:"runtime_root"`            // its --root
	Container    string        `json:"container"`               // container id, unique below RuntimeRoot
	Bundle       string        `json:"bundle"`                  // absolute path; its config.json starts InitMain
	Cgroup       string        `json:"cgroup"`                  // cgroupsPath of the bundle: absolute, the same below every hierarchy
	CgroupRoot   string        `json:"cgroup_root,omitempty"`   // where the hierarchies are mounted; "" is /sys/fs/cgroup
	LeaseFile    string        `json:"lease_file,omitempty"`    // see WriteLease; "" is no lease
	SegmentBytes int64         `json:"segment_bytes,omitempty"` // size of a spool segment; 0 is the spool's default
}

// check refuses a configuration that cannot have been written by a host program.
func (c Config) check() error {
	for _, f := range []struct{ name, value string }{
		{"spec.id", c.Spec.ID}, {"runtime", c.Runtime}, {"runtime_root", c.RuntimeRoot},
		{"container", c.Container}, {"bundle", c.Bundle}, {"cgroup", c.Cgroup},
	} {
		if f.value == "" {
			return errdefs.New(errdefs.Invalid, "%s lacks %s", configFile, f.name)
		}
	}
	for _, p := range []string{c.Runtime, c.RuntimeRoot, c.Bundle, c.Cgroup} {
		if !filepath.IsAbs(p) {
			return errdefs.New(errdefs.Invalid, "%s holds the relative path %q", configFile, p)
		}
	}
	return nil
}

// WriteConfig writes keep.json of a process directory durably. The host program
// does it once, before Start.
func WriteConfig(dir string, cfg Config) error {
	if err := cfg.check(); err != nil {
		return err
	}
	b, err := json.Marshal(cfg)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "encode %s", configFile)
	}
	return writeDurable(dir, configFile, b)
}

func readConfig(dir string) (Config, error) {
	b, err := os.ReadFile(filepath.Join(dir, configFile))
	if err != nil {
		return Config{}, errdefs.Wrap(err, errdefs.Internal, "read %s: %v", configFile, err)
	}
	var cfg Config
	if err := json.Unmarshal(b, &cfg); err != nil {
		return Config{}, errdefs.Wrap(err, errdefs.Internal, "%s is damaged: %v", configFile, err)
	}
	return cfg, cfg.check()
}
