package shim

import (
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
	RuntimeRoot  string        `json:"runtime_root"`            // its --root
	Container    string        `json:"container"`               // container id, unique below RuntimeRoot
	Bundle       string        `json:"bundle"`                  // absolute path; config.json starts InitMain
	Cgroup       string        `json:"cgroup"`                  // cgroupsPath of the bundle: absolute, the same below every hierarchy
	CgroupRoot   string        `json:"cgroup_root,omitempty"`   // where the hierarchies are mounted; "" is /sys/fs/cgroup
	LeaseFile    string        `json:"lease_file,omitempty"`    // see Lease; "" is no lease
	SegmentBytes int64         `json:"segment_bytes,omitempty"` // size of a spool segment; 0 is the spool's default
}
