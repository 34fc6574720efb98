// Package preflight says what this machine has and lacks for running boxes, in
// the words of the kernel, and how to bring what is missing.
package preflight

import "context"

// Config says where boxes would live.
type Config struct {
	Dir          string            // state directory, or the place it will be; "" skips its checks
	InitPath     string            // the stockade-host program, for the container probe; "" skips the probe
	Runtime      string            // name or path of the OCI runtime; "" is the first found
	CgroupParent string            // where the probe makes its control group; "" is /stockade-preflight
	Tools        map[string]string // programs to look for and the command that installs each; nil is none
}

// Check is the answer to one question.
type Check struct {
	Name   string `json:"name"`   // what people search for, such as "user namespaces"
	Needed bool   `json:"needed"` // boxes do not work without it
	OK     bool   `json:"ok"`
	Found  string `json:"found"`         // what was found, for people
	Fix    string `json:"fix,omitempty"` // the command that brings it, when not OK
}

// Run carries out every probe and returns their answers in a fixed order. It
// leaves nothing behind and takes at most a few seconds.
func Run(ctx context.Context, cfg Config) []Check { return nil }

// Missing returns the needed checks that are not OK.
func Missing(checks []Check) []Check { return nil }
