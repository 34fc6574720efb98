// Package testagent is a small coding agent for the demo and the tests. It speaks
// the Agent Client Protocol on its standard streams and follows a script instead
// of a model; the commands it announces it really runs, the files it announces to
// edit it really edits, and it asks before it edits.
package testagent
