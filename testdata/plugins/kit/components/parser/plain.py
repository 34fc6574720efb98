from langbot_plugin.api.definition.components.parser.parser import Parser
from langbot_plugin.api.entities.builtin.rag.models import ParseContext, ParseResult, TextSection


class Plain(Parser):
    async def parse(self, context: ParseContext) -> ParseResult:
        text = context.file_content.decode("utf-8", errors="replace")
        return ParseResult(
            text=text,
            sections=[TextSection(content=text, heading=context.filename, level=0)],
            metadata={"filename": context.filename, "mime_type": context.mime_type},
        )
