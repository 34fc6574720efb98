package testagent

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// ScriptFile is where the agent looks for its script in the working directory
// when it was given none.
const ScriptFile = ".testagent.json"

// Script is what the agent does when it is prompted.
type Script struct {
	// PaceMillis is the time between two pieces of text; 0 waits not at all.
	PaceMillis int64 `json:"pace_ms,omitempty"`
	// Piece is about how many bytes of text one message carries; 0 is 24.
	Piece int    `json:"piece,omitempty"`
	Steps []Step `json:"steps"`
}

// Step is one thing to do. Exactly one of its verbs is set.
type Step struct {
	Think string `json:"think,omitempty"`
	Say   string `json:"say,omitempty"`
	// Noise says so many bytes of text that looks random, as fast as it can. It is
	// the same each time.
	Noise int64 `json:"noise,omitempty"`
	// Read shows a file.
	Read string `json:"read,omitempty"`
	// Edit asks for permission, then replaces text in a file.
	Edit *Edit `json:"edit,omitempty"`
	// Run runs a command line with sh; Exit is what it must exit with.
	Run  string `json:"run,omitempty"`
	Exit int    `json:"exit,omitempty"`
}

// Edit replaces Old, which must occur exactly once, by New. Paths are relative
// to the working directory and cannot lead out of it.
type Edit struct {
	Path string `json:"path"`
	Old  string `json:"old"`
	New  string `json:"new"`
}

// ParseScript reads a script from JSON and refuses what it does not understand.
func ParseScript(b []byte) (Script, error) {
	var s Script
	dec := json.NewDecoder(strings.NewReader(string(b)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&s); err != nil {
		return Script{}, fmt.Errorf("the script is not valid: %w", err)
	}
	for i, st := range s.Steps {
		n := 0
		for _, set := range []bool{st.Think != "", st.Say != "", st.Noise > 0, st.Read != "", st.Edit != nil, st.Run != ""} {
			if set {
				n++
			}
		}
		if n != 1 {
			return Script{}, fmt.Errorf("step %d of the script has %d verbs, not one", i+1, n)
		}
	}
	return s, nil
}

// DefaultScript is followed without any other: it looks around.
func DefaultScript() Script {
	return Script{Steps: []Step{
		{Say: "I have no script, so I only look around."},
		{Run: "pwd && ls -A"},
	}}
}

func (s Script) pace() time.Duration { return time.Duration(s.PaceMillis) * time.Millisecond }

func (s Script) piece() int {
	if s.Piece <= 0 {
		return 24
	}
	return s.Piece
}
