package testmodel

import (
	"fmt"
	"strings"
)

// Turn is one answer of the model: some text, then at most one tool call. The
// first turn without a call ends the task.
type Turn struct {
	Text string
	Call *Call
}

// Call is a use of a tool. Exactly one field is set.
type Call struct {
	// Shell is a command line for the agent's shell.
	Shell string
	// Read is the absolute path of a file to look at. Claude Code edits only
	// what it has read.
	Read string
	// Edit replaces text in a file.
	Edit *Edit
}

// Edit replaces Old, which stands on one line and occurs once, by New in the
// file with the absolute path Path.
type Edit struct {
	Path, Old, New string
}

// toolUse is a call in the words of one client.
type toolUse struct {
	name  string
	input map[string]any
}

// shellLine says a call as a command line, for clients that have only a shell.
func (c *Call) shellLine() string {
	switch {
	case c.Read != "":
		return "cat " + quote(c.Read)
	case c.Edit != nil:
		return fmt.Sprintf("sed -i -e %s %s", quote("s/"+sedPattern(c.Edit.Old)+"/"+sedReplacement(c.Edit.New)+"/"), quote(c.Edit.Path))
	default:
		return c.Shell
	}
}

// tool chooses among the tools a client offers, by name. ok is false if it
// offers none of those that could do it.
func (c *Call) tool(offered map[string]bool) (u toolUse, ok bool) {
	switch {
	case c.Read != "" && offered["Read"]:
		return toolUse{"Read", map[string]any{"file_path": c.Read}}, true
	case c.Edit != nil && offered["Edit"]:
		return toolUse{"Edit", map[string]any{"file_path": c.Edit.Path, "old_string": c.Edit.Old, "new_string": c.Edit.New}}, true
	case offered["Bash"]:
		return toolUse{"Bash", map[string]any{"command": c.shellLine(), "description": "Work on the task"}}, true
	case offered["exec_command"]:
		return toolUse{"exec_command", map[string]any{"cmd": c.shellLine()}}, true
	case offered["shell_command"]:
		return toolUse{"shell_command", map[string]any{"command": c.shellLine()}}, true
	case offered["shell"]:
		return toolUse{"shell", map[string]any{"command": []string{"sh", "-c", c.shellLine()}}}, true
	}
	return toolUse{}, false
}

// quote makes one shell word.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// sedPattern is a basic regular expression that matches s.
func sedPattern(s string) string {
	return escape(s, `\/.*[]^$`)
}

func sedReplacement(s string) string { return escape(s, `\/&`) }

func escape(s, special string) string {
	var b strings.Builder
	for _, r := range s {
		if strings.ContainsRune(special, r) {
			b.WriteByte('\\')
		}
		b.WriteRune(r)
	}
	return b.String()
}

// pieces cuts a text into parts of about n bytes, at rune borders.
func pieces(s string, n int) []string {
	var out []string
	for len(s) > 0 {
		end := min(n, len(s))
		for end < len(s) && s[end]&0xc0 == 0x80 {
			end++
		}
		out = append(out, s[:end])
		s = s[end:]
	}
	return out
}
